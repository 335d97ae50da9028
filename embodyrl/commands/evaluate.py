"""Evaluation: fixed episodes, results per task with intervals, videos whose names say what happened.

`evaluate` is the command, with a table; `run_evaluation` what training calls as well.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cluster.protocol import OnVideoError
from embodyrl.commands.eval_result import EvalResult, episode_row, print_table, summarise
from embodyrl.commands.facts import facts
from embodyrl.commands.run_folder import open_run, resolve_weights
from embodyrl.commands.session import LOOP_FILE, announce, screen_only
from embodyrl.config.trust import resume_word
from embodyrl.errors import ConfigError, EmbodyError, Interrupted, WorkerError
from embodyrl.files import write_atomically
from embodyrl.monitor.history import EPISODES_FILE, TABLE_FILE, EpisodeRow, read_episodes, read_history
from embodyrl.monitor.paired import pair_suites
from embodyrl.monitor.samples import pick_samples, sample_lines
from embodyrl.plan.blueprint import Blueprint, draw_blueprint
from embodyrl.plan.episodes import EpisodeList, eval_episodes
from embodyrl.plan.held_out import evaluation_facts
from embodyrl.plan.protocols import protocol_record
from embodyrl.plan.roots import EvalConfig
from embodyrl.scheduler.rollout import Rollout, RolloutResult, VideoChoice
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
    blueprint = draw_blueprint(cfg, training=False)
    cfg = blueprint.config(EvalConfig) if cfg.eval.protocol.name else cfg
    if cfg.eval.baseline is not None:
        read_baseline(Path(cfg.eval.baseline))  # before anything starts
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
        print_table(result, monitor.text)
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
    rows = read_episodes(folder / EPISODES_FILE) if resume else []
    _begin_files(folder, rows)
    suites = blueprint.env.suites or ("",) * len(blueprint.env.tasks)
    with open(folder / EPISODES_FILE, "a", encoding="utf-8") as log:

        def note(episode: Episode) -> None:
            env, suite = blueprint.env, suites[episode.spec.task_id]
            known, factor = env.reports_success, env.reward_factor
            task = env.tasks[episode.spec.task_id]
            rows.append(episode_row(episode, known=known, reward_factor=factor, suite=suite, task=task))
            log.write(json.dumps(rows[-1].to_json()) + "\n")
            # Row by row, so that a killed evaluation goes on with the episodes that it has.
            log.flush()
            progress(len(rows), plan.num_episodes, "validation episodes")

        rollout = Rollout(
            plan.without({row.episode for row in rows}),
            greedy=not cfg.eval.sampling_params.do_sample,
            temperature=cfg.eval.sampling_params.temperature,
            keep=False,
            video=video_choice(cfg.video, plan, blueprint, videos, step),
            on_episode=note,
        )
        collection = workers.scheduler.collect(rollout)
    _complain(cfg, collection, warn)
    if not rows:
        raise EmbodyError("No episode of the evaluation could be finished; the env workers' logs say why.")
    result = summarise(rows, collection, blueprint.env, folder)
    result = replace(result, protocol=protocol_record(cfg, blueprint.env), **_against_baseline(cfg, rows))
    if cfg.video.startswith("changed:"):
        write_actions(folder, collection.episodes)
    for line in sample_lines(pick_samples((), rows, cfg.eval.show_replies)):
        warn(line)
    table = {k: v for k, v in asdict(result).items() if k != "folder"} | {"step": step, "env": blueprint.env.name}
    write_atomically(folder / TABLE_FILE, json.dumps(table, indent=2) + "\n")
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
    collection.complain(warn, set())


def _against_baseline(cfg: EvalConfig, rows: Sequence[EpisodeRow]) -> dict[str, Any]:
    if cfg.eval.baseline is None:
        return {}
    run = Path(cfg.eval.baseline)
    return {"baseline": run.name, "paired": tuple(pair_suites(read_baseline(run), rows))}


def read_baseline(run: Path) -> Sequence[EpisodeRow]:
    """Episodes of a run's last evaluation.

    Raises:
        ConfigError: it is no run, or has none.
    """
    found = read_history(run).evaluations
    if not found:
        raise ConfigError(f"eval.baseline={run}: that run has no evaluation. Fix: name a run of `embodyrl eval`.")
    return found[-1].episodes


def video_choice(pattern: str, plan: EpisodeList, blueprint: Blueprint, videos: Path, step: int) -> VideoChoice | None:
    """Turn `none | failures | first:N | all` into the choice per episode; `changed:N` is chosen afterwards."""
    if pattern == "none" or pattern.startswith("changed:"):
        return None
    order = [e.episode_id for e in plan.episodes]
    wanted = set(sorted(order)[: int(pattern.removeprefix("first:"))]) if pattern.startswith("first:") else set(order)
    keep = "failures" if pattern == "failures" else "all"

    return lambda spec: (
        (str(videos / film_stem(blueprint.env, spec, step)), keep) if spec.episode_id in wanted else None
    )


def film_stem(env: EnvSpec, spec: EpisodeSpec, step: int) -> str:
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
