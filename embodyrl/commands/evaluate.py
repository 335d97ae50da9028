"""Evaluation: fixed episodes, results per task with intervals, videos whose names say what happened.

`evaluate` is the command, with a table; `run_evaluation` what training calls as well.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cluster.settings import OnVideoError
from embodyrl.commands.facts import facts
from embodyrl.commands.run_folder import open_run, resolve_weights
from embodyrl.commands.session import LOOP_FILE, announce, screen_only
from embodyrl.config.trust import resume_word
from embodyrl.errors import ConfigError, EmbodyError, Interrupted, WorkerError
from embodyrl.files import write_atomically
from embodyrl.monitor.fanout import Fanout
from embodyrl.monitor.history import EPISODES_FILE, EpisodeRow, read_rows, score_of
from embodyrl.monitor.intervals import Mean, Rate, Score
from embodyrl.monitor.side_by_side import join_side_by_side
from embodyrl.plan.blueprint import Blueprint, draw_blueprint
from embodyrl.plan.episodes import EpisodeList, eval_episodes
from embodyrl.plan.held_out import evaluation_facts
from embodyrl.plan.roots import EvalConfig
from embodyrl.scheduler.rollout import Rollout, RolloutResult, VideoChoice
from embodyrl.scheduler.start import Workers, start_workers
from embodyrl.types import Episode, EpisodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Success of one task (or of all) and mean return, with 95 % intervals over initial states."""

    task_id: int
    """-1: all tasks together."""
    task: str
    episodes: int
    states: int
    """Different initial states among them."""
    effective_episodes: float
    """Independent episodes that say as much."""
    successes: int | None
    """None, like the next four: the environment says nothing of success."""
    success_once: float | None
    low: float | None
    high: float | None
    success_at_end: float | None
    mean_return: float
    return_low: float | None
    """None, like the next: a single state has no interval."""
    return_high: float | None
    mean_steps: float

    @property
    def score(self) -> Score:
        """Success, or the return where success is not known."""
        if self.successes is not None:
            return Rate(self.successes, self.episodes, self.states, self.effective_episodes)
        low = -math.inf if self.return_low is None else self.return_low
        high = math.inf if self.return_high is None else self.return_high
        return Mean(self.mean_return, (low, high), self.episodes, self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """An evaluation's table and files."""

    dropped: int
    """Episodes that were given up after they had killed their env worker again and again; the figures lack them."""
    overall: TaskResult
    tasks: tuple[TaskResult, ...]
    folder: Path
    recordings: tuple[tuple[int, str], ...]
    """(episode id, path) of each recording that was kept."""
    wall_s: float
    env_steps: int

    @property
    def exit_code(self) -> int:
        """Of the command that shows this result."""
        return WorkerError.exit_code if self.dropped else 0

    @property
    def videos(self) -> tuple[str, ...]:
        """Paths of the recordings."""
        return tuple(path for _, path in self.recordings)

    @property
    def losses(self) -> str:
        """What to think of episodes that were given up."""
        planned = self.dropped + self.overall.episodes
        return (
            f"INCOMPLETE: {self.dropped} of {planned} episodes killed their simulator again and again and are not "
            "counted; long and failing ones do so more often, so success may read too high"
        )

    def metrics(self) -> dict[str, float]:
        """Flat metrics for the monitor."""
        rows = {
            "eval/success_once": self.overall.success_once,
            "eval/success_at_end": self.overall.success_at_end,
            "eval/return": self.overall.mean_return,
            "eval/episode_len": self.overall.mean_steps,
            "eval/episodes": float(self.overall.episodes),
            "eval/effective_episodes": self.overall.effective_episodes,
            "eval/dropped_episodes": float(self.dropped),
        }
        rows |= {f"eval/task_{row.task_id}/success_once": row.success_once for row in self.tasks}
        return {name: value for name, value in rows.items() if value is not None}


def evaluate(cfg: EvalConfig, *, overrides: Sequence[str] = (), resume: Path | None = None) -> EvalResult:
    """Evaluate `ckpt`, or the model's own weights, and write results into a run folder of its own.

    Args:
        cfg: what to evaluate.
        overrides: as typed, for the run's records.
        resume: an interrupted evaluation's run folder; every episode counts exactly once.

    Raises:
        EmbodyError: every failure that has a cause to name; its `exit_code` is the process's.
    """
    blueprint = draw_blueprint(cfg, training=False)
    weights = resolve_weights(cfg.ckpt) if cfg.ckpt else None
    step = _step_of(weights)
    if resume is not None and not (resume / "eval" / f"step_{step:06d}").is_dir():
        raise ConfigError(f"{resume}: no evaluation of step {step} was begun there; ckpt={cfg.ckpt} has moved on.")
    folder = open_run(cfg, "eval", overrides, resume)
    monitor = screen_only(cfg)
    try:
        lines = [
            *facts(blueprint),
            *evaluation_facts(blueprint),
            ("weights", str(cfg.ckpt or cfg.model.weights)),
            ("output", str(folder.root)),
        ]
        announce(monitor, cfg, folder, "eval", lines)
        folder.eval_folder(step).mkdir(parents=True, exist_ok=True)  # from here on --resume goes on with it
        try:
            workers = start_workers(blueprint, folder.logs, monitor.text, start_from=weights)
            with workers.running():
                result = run_evaluation(
                    blueprint,
                    workers,
                    folder=folder.eval_folder(step),
                    videos=folder.videos,
                    step=step,
                    progress=monitor.progress,
                    warn=monitor.text,
                    resume=resume is not None,
                )
        except (Interrupted, WorkerError) as error:
            said, *details = str(error).splitlines()
            said += f"; go on with: embodyrl eval --resume {folder.root}{resume_word(cfg)}"
            error.args = ("\n".join([said, *details]),)
            raise
        _print_table(result, monitor)
        return result
    finally:
        monitor.close()
        folder.unlock()


def _step_of(weights: Path | None) -> int:
    """Training step of the evaluated weights; 0 where they are no checkpoint of ours."""
    if weights is None or not (weights.parent / "manifest.json").is_file():
        return 0
    CheckpointStore(weights.parent.parent).verify(weights.parent)
    return int(json.loads((weights.parent / LOOP_FILE).read_text(encoding="utf-8"))["step"])


def _print_table(result: EvalResult, monitor: Fanout) -> None:
    if result.dropped:
        monitor.text(f"  {result.losses}")
    known = result.overall.success_once is not None
    table = [("task", f"{'success' if known else 'return'}, 95 % interval", "steps", "return" if known else "")]
    table += [
        (row.task, str(row.score), f"{row.mean_steps:.0f}", f"{row.mean_return:.4g}" if known else "")
        for row in (*result.tasks, result.overall)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        monitor.text("  " + "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    speed = result.env_steps / result.wall_s if result.wall_s else 0.0
    monitor.text(f"  {result.env_steps} env steps in {result.wall_s:.1f} s ({speed:.0f} env steps/s)")
    monitor.text(f"  results  {result.folder}/eval.json, episodes.jsonl")
    for path in result.videos[:10]:
        monitor.text(f"  video    {path}")
    if len(result.videos) > 10:
        monitor.text(f"  video    {len(result.videos) - 10} more in {Path(result.videos[0]).parent}")


def run_evaluation(
    blueprint: Blueprint,
    workers: Workers,
    *,
    folder: Path,
    videos: Path,
    step: int,
    progress: Callable[[int, int, str], None],
    warn: Callable[[str], None],
    resume: bool = False,
) -> EvalResult:
    """Evaluate the weights the workers holds and write `eval.json` and `episodes.jsonl` into `folder`.

    With `resume`, episodes that an interrupted evaluation has finished there count and are not run again.

    Raises:
        EmbodyError: recordings failed and `faults.on_video_error=stop`, or no episode could be finished.
    """
    cfg = blueprint.config(EvalConfig)
    plan = eval_episodes(cfg, blueprint.env, blueprint.policy)
    folder.mkdir(parents=True, exist_ok=True)
    if cfg.video != "none":
        _check_writable(videos)
    rows = [EpisodeRow.from_json(raw) for raw in read_rows(folder / EPISODES_FILE)] if resume else []
    # Anew, because the last row of a killed process may be cut.
    write_atomically(folder / EPISODES_FILE, "".join(json.dumps(row.to_json()) + "\n" for row in rows))
    with open(folder / EPISODES_FILE, "a", encoding="utf-8") as log:

        def note(episode: Episode) -> None:
            rows.append(_episode_row(episode, known=blueprint.env.reports_success))
            log.write(json.dumps(rows[-1].to_json()) + "\n")
            log.flush()
            progress(len(rows), plan.num_episodes, "eval")

        rollout = Rollout(
            plan.without({row.episode for row in rows}),
            greedy=not cfg.eval.sampling_params.do_sample,
            temperature=cfg.eval.sampling_params.temperature,
            keep=False,
            video=video_choice(cfg.video, plan, blueprint, videos, step),
            on_episode=note,
        )
        collection = workers.scheduler.collect(rollout)
    failed = collection.video_problems
    if failed and cfg.faults.on_video_error == OnVideoError.stop:
        raise EmbodyError(f"{failed[0]} ({len(failed)} recordings failed; faults.on_video_error=warn goes on)")
    for problem, times in Counter(failed).most_common(3):
        warn(f"{times} recording{'s' * (times > 1)} failed: {problem}")
    collection.complain(warn, set())
    if not rows:
        raise EmbodyError("No episode of the evaluation could be finished; the env workers' logs say why.")
    result = _summarise(rows, collection, blueprint.env.tasks, folder)
    table = {k: v for k, v in asdict(result).items() if k != "folder"} | {"step": step, "env": blueprint.env.name}
    write_atomically(folder / "eval.json", json.dumps(table, indent=2) + "\n")
    return result


def video_choice(pattern: str, plan: EpisodeList, blueprint: Blueprint, videos: Path, step: int) -> VideoChoice | None:
    """Turn `none | failures | first:N | all` into the choice per episode."""
    if pattern == "none":
        return None
    order = [e.episode_id for e in plan.episodes]
    wanted = set(sorted(order)[: int(pattern.removeprefix("first:"))]) if pattern.startswith("first:") else set(order)
    keep = "failures" if pattern == "failures" else "all"

    def choose(spec: EpisodeSpec) -> tuple[str, str] | None:
        if spec.episode_id not in wanted:
            return None
        task = re.sub(r"[^a-z0-9]+", "_", blueprint.env.tasks[spec.task_id].lower()).strip("_")[:48]
        _, state = blueprint.env.task_of(spec.reset_id)
        stem = f"step{step:06d}_task{spec.task_id:02d}_{task}_state{state:02d}_seed{spec.seed}_ep{spec.episode_id:03d}"
        return str(videos / stem), keep

    return choose


def _summarise_task(task_id: int, task: str, episodes: Sequence[EpisodeRow]) -> TaskResult:
    count, score = len(episodes), score_of(episodes)
    rate = score if isinstance(score, Rate) else None
    earned = Mean.of((e.reset_id, e.episode_return) for e in episodes)
    return TaskResult(
        task_id=task_id,
        task=task,
        episodes=count,
        states=earned.states,
        effective_episodes=rate.effective if rate and rate.effective is not None else count,
        successes=rate.successes if rate else None,
        success_once=rate.value if rate else None,
        low=rate.interval[0] if rate else None,
        high=rate.interval[1] if rate else None,
        success_at_end=sum(bool(e.success_at_end) for e in episodes) / count if rate else None,
        mean_return=earned.value,
        return_low=earned.interval[0] if earned.states > 1 else None,
        return_high=earned.interval[1] if earned.states > 1 else None,
        mean_steps=sum(e.steps for e in episodes) / count,
    )


def _summarise(rows: Sequence[EpisodeRow], collection: RolloutResult, tasks: Sequence[str], folder: Path) -> EvalResult:
    ids = sorted({row.task_id for row in rows})
    return EvalResult(
        overall=_summarise_task(-1, "overall", rows),
        tasks=tuple(_summarise_task(task, tasks[task], [r for r in rows if r.task_id == task]) for task in ids),
        dropped=collection.dropped,
        folder=folder,
        recordings=tuple((row.episode, row.video) for row in rows if row.video),
        wall_s=collection.tally.wall_s,
        env_steps=collection.tally.env_steps,
    )


def _episode_row(episode: Episode, *, known: bool) -> EpisodeRow:
    # What is not announced may come all the same: some environments only speak of success at the end.
    known = known or episode.success_once
    return EpisodeRow(
        episode=episode.spec.episode_id,
        task_id=episode.spec.task_id,
        task=episode.instruction,
        reset_id=episode.spec.reset_id,
        seed=episode.spec.seed,
        success_once=episode.success_once if known else None,
        success_at_end=episode.success_at_end if known else None,
        episode_return=episode.episode_return,
        steps=episode.length,
        terminated=episode.terminated,
        truncated=episode.truncated,
        seconds=round(episode.duration_s, 3),
        video=episode.video,
    )


def _check_writable(folder: Path) -> None:
    """Find out before any rollout whether recordings can be written."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EmbodyError(
            f"Cannot write recordings to {folder}: {error.strerror}. Choose another video_cfg.base_dir, or video=none."
        ) from error


def changes(first: EvalResult, last: EvalResult) -> list[tuple[str, Score, Score]]:
    """Score per task and of all of them, before and after; both validations ran the same episodes."""
    before = {row.task_id: row.score for row in first.tasks}
    found = [(row.task, before[row.task_id], row.score) for row in last.tasks if row.task_id in before]
    return [*found, ("all tasks", first.overall.score, last.overall.score)] if len(found) > 1 else found


def compare_recordings(
    first: EvalResult, last: EvalResult, folder: Path, *, steps: tuple[int, int], fps: int, warn: Callable[[str], None]
) -> list[Path]:
    """Join the recordings of episodes that both validations kept; a failure to do so is only reported."""
    before = dict(first.recordings)
    joined: list[Path] = []
    for episode, path in last.recordings:
        if episode not in before:
            continue
        out = folder / f"before_after_ep{episode:03d}.mp4"
        labels = (f"before (step {steps[0]})", f"after (step {steps[1]})")
        try:
            join_side_by_side(Path(before[episode]), Path(path), out, labels=labels, fps=fps)
        except (OSError, RuntimeError, ValueError) as error:
            warn(f"could not join the recordings of episode {episode}: {error}")
            continue
        joined.append(out)
    return joined
