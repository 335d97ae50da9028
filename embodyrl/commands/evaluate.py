"""Evaluation: fixed episodes, results per task with intervals, videos whose names say what happened.

`evaluate` is the command, with a table; `run_evaluation` what training calls as well.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cluster.protocol import OnVideoError
from embodyrl.commands.eval_result import EvalResult, episode_row, print_table, summarise
from embodyrl.commands.facts import facts
from embodyrl.commands.run_folder import RunFolder, first_weights, open_run, weight_facts
from embodyrl.commands.session import LOOP_FILE, announce, screen_only
from embodyrl.config.settings import plain
from embodyrl.config.trust import trust_words
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, Interrupted, WorkerError
from embodyrl.extensions.reporting.held_out import evaluation_facts
from embodyrl.extensions.reporting.side_by_side import join_side_by_side
from embodyrl.files import json_text, write_atomically
from embodyrl.monitor.fanout import Fanout
from embodyrl.monitor.history import EPISODES_FILE, TABLE_FILE, EpisodeRow, read_episodes, read_history, read_table
from embodyrl.monitor.paired import other_worlds, pair_suites
from embodyrl.monitor.samples import pick_samples, sample_lines
from embodyrl.plan.episodes import EpisodeList, eval_episodes
from embodyrl.plan.keys import state_keys
from embodyrl.plan.protocols import protocol_record
from embodyrl.plan.roots import EvalConfig
from embodyrl.plan.run_plan import RunPlan, build_run_plan
from embodyrl.scheduler.rollout import Rollout, RolloutResult, Tally, VideoChoice
from embodyrl.scheduler.start import Workers, start_workers
from embodyrl.types import EnvSpec, Episode, EpisodeSpec

ACTIONS_FILE = "actions.npz"


def evaluate(cfg: EvalConfig, *, overrides: Sequence[str] = (), resume: Path | None = None) -> EvalResult:
    """Evaluate `ckpt`, or the model's own weights, and write results into a run folder of its own.

    Args:
        cfg: what to evaluate.
        overrides: as typed, for the run's records.
        resume: an interrupted evaluation's run folder; every episode counts exactly once.

    Raises:
        EmbodyError: every failure that has a cause to name; its `exit_code` is the process's.
    """
    run_plan = build_run_plan(cfg, training=False)
    cfg = run_plan.config(EvalConfig) if cfg.eval.protocol.name else cfg
    if cfg.eval.baseline is not None:
        read_baseline(cfg)  # before anything starts
    weights = first_weights(cfg, run_plan.env)
    step = _step_of(weights)
    if resume is not None and not (resume / "eval" / f"step_{step:06d}").is_dir():
        raise ConfigError(f"{resume}: no evaluation of step {step} was begun there; ckpt={cfg.ckpt} has moved on.")
    with closing(open_run(cfg, "eval", overrides, resume)) as folder, closing(screen_only(cfg)) as monitor:
        lines = [
            *facts(run_plan),
            *evaluation_facts(run_plan),
            *weight_facts(cfg, weights),
            ("output", str(folder.root)),
        ]
        announce(monitor, cfg, folder, "eval", lines)
        folder.eval_folder(step).mkdir(parents=True, exist_ok=True)  # from here on --resume goes on with it
        try:
            workers = start_workers(run_plan, folder.logs, monitor.text, start_from=weights)
            with workers.running():
                result = run_evaluation(run_plan, workers, folder, monitor, step, resume=resume is not None)
        except (Interrupted, WorkerError) as error:
            if error.exit_code in (ConfigError.exit_code, CheckpointError.exit_code):
                raise  # another try would end like this one
            said, *details = str(error).splitlines()
            again = ["embodyrl", "eval", "--resume", str(folder.root), *trust_words(cfg)]
            said += f"; go on with: {shlex.join(again)}"
            error.args = ("\n".join([said, *details]),)
            raise
        print_table(result, monitor.text)
        return result


def _step_of(weights: Path | None) -> int:
    """Training step of the evaluated weights; 0 where they are no checkpoint of ours."""
    if weights is None or not (weights.parent / "manifest.json").is_file():
        return 0
    CheckpointStore(weights.parent.parent).verify(weights.parent)
    return int(json.loads((weights.parent / LOOP_FILE).read_text(encoding="utf-8"))["step"])


def run_evaluation(
    run_plan: RunPlan, workers: Workers, run: RunFolder, monitor: Fanout, step: int, *, resume: bool = False
) -> EvalResult:
    """Evaluate the weights that the workers hold and write `eval.json` and `episodes.jsonl` into the step's folder.

    With `resume`, episodes that an interrupted evaluation has finished there count and are not run again.

    Raises:
        EmbodyError: recordings failed and `faults.on_video_error=stop`, or no episode could be finished.
    """
    cfg = run_plan.config(EvalConfig)
    plan = eval_episodes(cfg, run_plan.env, run_plan.policy)
    folder = run.eval_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    if cfg.video != "none":
        _check_writable(run.videos)
    rows = read_episodes(folder / EPISODES_FILE) if resume else []
    _begin_files(folder, rows)
    with open(folder / EPISODES_FILE, "a", encoding="utf-8") as log:

        def note(episode: Episode) -> None:
            rows.append(episode_row(episode, run_plan.env))
            log.write(json.dumps(rows[-1].to_json()) + "\n")
            # Row by row, so that a killed evaluation goes on with the episodes that it has.
            log.flush()
            monitor.progress(len(rows), plan.num_episodes, "validation episodes")

        rollout = Rollout(
            plan.without({row.episode for row in rows}),
            greedy=not cfg.eval.sampling_params.do_sample,
            temperature=cfg.eval.sampling_params.temperature,
            keep=False,
            video=video_choice(cfg.video, plan, run_plan, run.videos, step),
            on_episode=note,
        )
        collection = workers.scheduler.collect(rollout)
    _complain(cfg, collection, monitor.text)
    if not rows:
        raise EmbodyError("No episode of the evaluation could be finished; the env workers' logs say why.")
    result = summarise(rows, collection, run_plan.env, folder)
    result = replace(result, protocol=protocol_record(cfg, run_plan.env), **_against_baseline(cfg, rows))
    if cfg.video.startswith("changed:"):
        write_actions(folder, collection.episodes)
    for line in sample_lines(pick_samples((), rows, cfg.eval.show_replies)):
        monitor.text(line)
    table = {k: v for k, v in asdict(result).items() if k != "folder"} | {"step": step, "env": run_plan.env.name}
    write_atomically(folder / TABLE_FILE, json_text(table))
    return result


def _begin_files(folder: Path, rows: Sequence[EpisodeRow]) -> None:
    """Begin with the episodes that are known; until the table is written, nobody takes them for an evaluation."""
    (folder / TABLE_FILE).unlink(missing_ok=True)
    # Anew, because the last row of a killed process may be cut.
    write_atomically(folder / EPISODES_FILE, "".join(json.dumps(row.to_json()) + "\n" for row in rows))


def _complain(cfg: EvalConfig, collection: RolloutResult, warn: Callable[[str], None]) -> None:
    failed = collection.video_problems
    if failed and cfg.faults.on_video_error == OnVideoError.stop:
        raise EmbodyError(f"{failed[0]} ({len(failed)} recordings failed; faults.on_video_error=warn goes on)")
    for problem, times in Counter(failed).most_common(3):
        warn(f"{times} recording{'s' * (times > 1)} failed: {problem}")
    collection.report_reward_errors(warn, set())


def _against_baseline(cfg: EvalConfig, rows: Sequence[EpisodeRow]) -> dict[str, Any]:
    if cfg.eval.baseline is None:
        return {}
    return {"baseline": Path(cfg.eval.baseline).name, "paired": tuple(pair_suites(read_baseline(cfg), rows))}


def read_baseline(cfg: EvalConfig) -> Sequence[EpisodeRow]:
    """Episodes of the last evaluation of `eval.baseline`.

    Raises:
        ConfigError: it is no run, has none, or one of another environment.
    """
    run = Path(str(cfg.eval.baseline))
    history = read_history(run)
    if not history.evaluations:
        raise ConfigError(f"eval.baseline={run}: that run has no evaluation. Fix: name a run of `embodyrl eval`.")
    if differs := other_worlds(history.config, plain(cfg), state_keys()):
        raise ConfigError(
            f"eval.baseline={run}: its initial states are others ({differs}), so that nothing can be compared in "
            "pairs. Evaluate both alike, or leave it out."
        )
    return history.evaluations[-1].episodes


def video_choice(pattern: str, plan: EpisodeList, run_plan: RunPlan, videos: Path, step: int) -> VideoChoice | None:
    """Turn `none | failures | first:N | all` into the choice per episode; `changed:N` is chosen afterwards."""
    if pattern == "none" or pattern.startswith("changed:"):
        return None
    order = [e.episode_id for e in plan.episodes]
    wanted = set(sorted(order)[: int(pattern.removeprefix("first:"))]) if pattern.startswith("first:") else set(order)
    keep = "failures" if pattern == "failures" else "all"

    return lambda spec: (
        (str(videos / video_stem_of(run_plan.env, spec, step)), keep) if spec.episode_id in wanted else None
    )


def video_stem_of(env: EnvSpec, spec: EpisodeSpec, step: int) -> str:
    """Name of an episode's recording, before outcome and length."""
    task = re.sub(r"[^a-z0-9]+", "_", env.tasks[spec.task_id].lower()).strip("_")[:48]
    _, state = env.task_of(spec.reset_id)
    return f"step{step:06d}_task{spec.task_id:02d}_{task}_state{state:02d}_seed{spec.seed}_ep{spec.episode_id:03d}"


def write_actions(folder: Path, episodes: Sequence[Episode]) -> None:
    """Keep what was done in an evaluation, [T, K, A] by episode number, so that any episode can be filmed later."""
    held = io.BytesIO()
    np.savez_compressed(held, **{str(e.spec.episode_id): e.action for e in episodes})  # type: ignore[arg-type]
    write_atomically(folder / ACTIONS_FILE, held.getvalue())


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


Say = Callable[[str], None]


def read_evaluation(folder: Path, env: EnvSpec) -> EvalResult | None:
    """A validation that an earlier process of this run finished, from its files; None: there is none."""
    rows, saved = read_episodes(folder / EPISODES_FILE), read_table(folder)
    if not rows or not saved:
        return None
    spent = Tally(wall_s=saved["wall_s"], env_steps=saved["env_steps"])
    return summarise(rows, RolloutResult(dropped=saved["dropped"], tally=spent), env, folder)


def select_episodes_to_record(before: Sequence[EpisodeRow], after: Sequence[EpisodeRow], count: int) -> list[int]:
    """Numbers of the episodes to look at: of every task one that went from failure to success, then of every task one
    that still fails, and so on; afterwards those that got worse and those that always worked.

    Of those that changed the longest come first, as there is more to see. Where success is not known, the largest and
    the smallest gain in return.
    """
    earlier = {row.episode: row for row in before}
    pairs = [(earlier[row.episode], row) for row in after if row.episode in earlier]
    by_task: dict[int, list[list[int]]] = {}
    known = any(row.success_once is not None for row in after)
    for a, b in sorted(pairs, key=lambda p: -p[1].steps if known else p[0].episode_return - p[1].episode_return):
        kind = (not b.success_once, bool(a.success_once)) if known else (False, False)
        place = [(False, False), (True, False), (True, True), (False, True)].index(kind)
        by_task.setdefault(b.task_id, [[], [], [], []])[place].append(b.episode)
        if not known and len(by_task[b.task_id][0]) > 1:
            by_task[b.task_id][1] = [by_task[b.task_id][0].pop()] + by_task[b.task_id][1]
    turns = [
        [e for pair in zip_longest(*groups[:2]) for e in pair] + groups[2] + groups[3] for groups in by_task.values()
    ]
    order = [episode for turn in zip_longest(*turns) for episode in turn if episode is not None]
    return order[:count]


def film(
    run_plan: RunPlan, workers: Workers, result: EvalResult, wanted: Sequence[int], videos: Path, say: Say
) -> EvalResult:
    """Play episodes of a validation again, action by action, and record them; the result with its recordings.

    What does not come out as it did then is left out and said: a simulator need not repeat itself.
    """
    cfg = run_plan.config(EvalConfig)
    plan = eval_episodes(cfg, run_plan.env, run_plan.policy)
    with np.load(result.folder / ACTIONS_FILE) as kept:
        actions = {episode: kept[str(episode)] for episode in wanted if str(episode) in kept}

    def choose(spec: EpisodeSpec) -> tuple[str, str]:
        return str(videos / video_stem_of(run_plan.env, spec, result.step)), "all"

    again = Rollout(
        plan.without({e.episode_id for e in plan.episodes} - actions.keys()), keep=False, video=choose, replayed=actions
    )
    played = workers.scheduler.collect(again)
    for problem in dict.fromkeys(played.video_problems):
        say(f"recording failed: {problem}")
    rows = {row.episode: row for row in read_episodes(result.folder / EPISODES_FILE)}
    films: dict[int, str] = {}
    for episode in played.episodes:
        number = episode.spec.episode_id
        if episode.video and bool(rows[number].success_once) == episode.success_once:
            films[number] = episode.video
        elif episode.video:
            Path(episode.video).unlink(missing_ok=True)
            say(f"episode {number} of step {result.step} came out otherwise when it was played again; it has no film")
    told = (replace(row, video=films.get(row.episode, row.video)).to_json() for row in rows.values())
    write_atomically(result.folder / EPISODES_FILE, "".join(json.dumps(row) + "\n" for row in told))
    return replace(result, recordings=tuple(films.items()))


def film_changes(
    run_plan: RunPlan, workers: Workers, ends: tuple[EvalResult, EvalResult], videos: Path, say: Say
) -> tuple[EvalResult, EvalResult]:
    """With `video=changed:N`: films of N telling episodes in the first and the last validation."""
    choice = run_plan.config(EvalConfig).video
    if not choice.startswith("changed:") or not all((end.folder / ACTIONS_FILE).is_file() for end in ends):
        return ends
    before, after = (read_episodes(end.folder / EPISODES_FILE) for end in ends)
    wanted = select_episodes_to_record(before, after, int(choice.removeprefix("changed:")))
    videos.mkdir(parents=True, exist_ok=True)
    first, last = (film(run_plan, workers, end, wanted, videos, say) for end in ends)
    order = {episode: place for place, episode in enumerate(wanted)}
    return first, replace(last, recordings=tuple(sorted(last.recordings, key=lambda found: order[found[0]])))


def compare_recordings(first: EvalResult, last: EvalResult, folder: Path, *, fps: int, warn: Say) -> list[Path]:
    """Join the recordings of episodes that both validations kept; a failure to do so is only reported."""
    before = dict(first.recordings)
    joined: list[Path] = []
    for episode, path in last.recordings:
        if episode not in before:
            continue
        out = folder / f"before_after_ep{episode:03d}.mp4"
        labels = (f"before (step {first.step})", f"after (step {last.step})")
        try:
            join_side_by_side(Path(before[episode]), Path(path), out, labels=labels, fps=fps)
        except (OSError, RuntimeError, ValueError) as error:
            warn(f"could not join the recordings of episode {episode}: {error}")
            continue
        joined.append(out)
    return joined
