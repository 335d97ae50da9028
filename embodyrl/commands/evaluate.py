"""Evaluation on fixed initial states and seeds, with results per task and videos named by outcome.

`evaluate` implements `embodyrl eval`; validations during training call `run_evaluation`.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from embodyrl.checkpoint.store import read_step
from embodyrl.cluster.protocol import OnVideoError
from embodyrl.commands.banner import evaluation_banner_lines, start_banner_lines
from embodyrl.commands.episode_storage import open_writer, record_every_step, stores_episodes
from embodyrl.commands.eval_result import EvalResult, print_table, summarize, to_episode_row
from embodyrl.commands.run_folder import RunFolder, open_run, resolve_initial_weights
from embodyrl.commands.session import build_console_monitor, print_banner
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, Interrupted, WorkerError
from embodyrl.files import json_text, write_atomically
from embodyrl.monitor.group import MonitorGroup
from embodyrl.monitor.history import EPISODES_FILE, TABLE_FILE, read_episodes, read_table
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.episodes import EpisodeList, eval_episodes
from embodyrl.plan.memory_limits import resource_banner_lines
from embodyrl.plan.protocols import build_protocol_record
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.reports.samples import format_samples, pick_samples
from embodyrl.scheduler.rollout import ChooseVideo, Rollout, RolloutResult, RolloutStats
from embodyrl.scheduler.start import RolloutWorkers, start_workers
from embodyrl.types import EnvSpec, Episode, EpisodeSpec

ACTIONS_FILE = "actions.npz"


def evaluate(cfg: Config, *, overrides: Sequence[str] = (), resume: Path | None = None) -> EvalResult:
    """Evaluate `ckpt`, or the model's own weights, and write results into a new run folder.

    Args:
        cfg: settings of the evaluation.
        overrides: command-line arguments, which are stored in the run folder.
        resume: run folder of an interrupted evaluation, whose finished episodes are not repeated.

    Raises:
        EmbodyError: any failure with a known cause; its `exit_code` is the exit code of the process.
    """
    run_plan = build_run_plan(cfg, training=False)
    if stores_episodes(run_plan):
        run_plan = record_every_step(run_plan)
    resource_lines = resource_banner_lines(run_plan)  # also checks the resources
    weights = resolve_initial_weights(cfg, run_plan.env)
    step = read_step(weights)
    # A process that was killed early has no evaluation folder yet.
    started_steps = [] if resume is None else sorted(entry.name for entry in (resume / "eval").glob("step_*"))
    if started_steps and f"step_{step:06d}" not in started_steps:
        raise ConfigError(
            f"{resume} evaluates {started_steps[-1]}, but ckpt={cfg.ckpt} is a checkpoint of step {step}. Remove "
            "--resume to start a new evaluation."
        )
    with open_run(cfg, "eval", overrides, resume) as folder, closing(build_console_monitor(cfg)) as monitor:
        lines = [
            *start_banner_lines(run_plan, weights),
            *evaluation_banner_lines(run_plan),
            *resource_lines,
            ("run", str(folder.root)),
        ]
        print_banner(monitor, cfg, folder, "eval", lines)
        folder.eval_folder(step).mkdir(parents=True, exist_ok=True)  # --resume needs this folder
        try:
            workers = start_workers(run_plan, folder.logs, monitor.text, start_from=weights, progress=monitor.progress)
            with workers.running():
                result = run_evaluation(run_plan, workers, folder, monitor, step, resume=resume is not None)
        except (Interrupted, WorkerError) as error:
            if error.exit_code in (ConfigError.exit_code, CheckpointError.exit_code):
                raise  # a resumed evaluation would fail again
            message, *details = str(error).splitlines()
            error.args = ("\n".join([f"{message}; {folder.resume_line}", *details]),)
            raise
        print_table(result, monitor.text)
        return result


def run_evaluation(
    run_plan: RunPlan,
    workers: RolloutWorkers,
    run: RunFolder,
    monitor: MonitorGroup,
    step: int,
    *,
    resume: bool = False,
) -> EvalResult:
    """Evaluate the workers' weights and write `eval.json` and `episodes.jsonl` into the folder of the step.

    With `resume`, the finished episodes of an interrupted evaluation count and are not repeated.

    Raises:
        EmbodyError: recordings failed and `faults.on_video_error=stop`, or no episode could be finished.
    """
    cfg = run_plan.cfg
    plan = eval_episodes(cfg, run_plan.env, run_plan.policy)
    folder = run.eval_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    if cfg.video != "none":
        _check_writable(run.videos)
    rows = read_episodes(folder / EPISODES_FILE) if resume else []
    (folder / TABLE_FILE).unlink(missing_ok=True)  # this file marks an evaluation as complete
    # Rewrite the file, because the last row of a killed process may be truncated.
    write_atomically(folder / EPISODES_FILE, "".join(json.dumps(row.to_json()) + "\n" for row in rows))
    stores_dataset = run_plan.single_step  # validations during training keep no episodes
    writer_context = open_writer(run_plan, workers.arena, run.root, monitor.text) if stores_dataset else nullcontext()
    with open(folder / EPISODES_FILE, "a", encoding="utf-8") as log, writer_context as writer:

        def on_episode(episode: Episode) -> None:
            rows.append(to_episode_row(episode, run_plan.env))
            log.write(json.dumps(rows[-1].to_json()) + "\n")
            # Row by row, so that a killed evaluation resumes with its finished episodes.
            log.flush()
            if writer is not None:
                writer.add([episode], step)
                workers.scheduler.release(rollout.out, [episode])
            monitor.progress(len(rows), plan.num_episodes, "validation episodes")

        rollout = Rollout(
            plan.exclude({row.episode for row in rows}),
            greedy=not cfg.eval.sampling_params.do_sample,
            temperature=cfg.eval.sampling_params.temperature,
            keep=stores_dataset,
            video=choose_videos(cfg.video, plan, run_plan, run.videos, step),
            on_episode=on_episode,
        )
        collection = workers.scheduler.collect(rollout)
    _report_problems(cfg, collection, monitor.text)
    if not rows:
        raise EmbodyError("No episode of the evaluation finished. See the logs of the env workers for the cause.")
    result = summarize(rows, collection, run_plan.env, folder)
    result = replace(result, protocol=build_protocol_record(cfg, run_plan.env))
    if cfg.video.startswith("changed:"):
        write_actions(folder, collection.episodes)
    for line in format_samples(pick_samples((), rows, cfg.eval.show_replies)):
        monitor.text(line)
    table = asdict(result) | {"step": step, "env": run_plan.env.name}
    del table["folder"]
    write_atomically(folder / TABLE_FILE, json_text(table))
    return result


def _report_problems(cfg: Config, collection: RolloutResult, write_line: Callable[[str], None]) -> None:
    failed = collection.video_problems
    if failed and cfg.faults.on_video_error == OnVideoError.stop:
        raise EmbodyError(f"{len(failed)} recordings failed (set faults.on_video_error=warn to continue): {failed[0]}")
    for problem, count in Counter(failed).most_common(3):
        write_line(f"{count} recording{'s' * (count > 1)} failed: {problem}")
    collection.report_reward_errors(write_line, set())


def choose_videos(pattern: str, plan: EpisodeList, run_plan: RunPlan, videos: Path, step: int) -> ChooseVideo | None:
    """Return the function that selects episodes to record; None for `none` and for `changed:N`."""
    if pattern == "none" or pattern.startswith("changed:"):
        return None
    episode_ids = sorted(episode.episode_id for episode in plan.episodes)
    if pattern.startswith("first:"):
        episode_ids = episode_ids[: int(pattern.removeprefix("first:"))]
    selected, keep = {*episode_ids}, "failures" if pattern == "failures" else "all"

    def choose(spec: EpisodeSpec) -> tuple[str, str] | None:
        stem = get_video_stem(run_plan.env, spec, step)
        return (str(videos / stem), keep) if spec.episode_id in selected else None

    return choose


def get_video_stem(env: EnvSpec, spec: EpisodeSpec, step: int) -> str:
    """Return the first part of the file name of an episode's video; outcome and number of steps are appended later."""
    task = re.sub(r"[^a-z0-9]+", "_", env.tasks[spec.task_id].lower()).strip("_")[:48]
    _, state = env.task_of(spec.reset_id)
    return f"step{step:06d}_task{spec.task_id:02d}_{task}_state{state:02d}_seed{spec.seed}_ep{spec.episode_id:03d}"


def write_actions(folder: Path, episodes: Sequence[Episode]) -> None:
    """Write the actions [T, K, A] of each episode by episode id, so that episodes can be replayed and recorded."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{str(episode.spec.episode_id): episode.action for episode in episodes})  # type: ignore[arg-type]
    write_atomically(folder / ACTIONS_FILE, buffer.getvalue())


def _check_writable(folder: Path) -> None:
    """Raise an error if videos cannot be written to the folder."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EmbodyError(
            f"Cannot write recordings to {folder}: {error.strerror}. Choose another video_cfg.base_dir, or video=none."
        ) from error


def read_evaluation(folder: Path, env: EnvSpec) -> EvalResult | None:
    """Read the result of a finished evaluation from its folder; None: no finished evaluation."""
    rows, saved = read_episodes(folder / EPISODES_FILE), read_table(folder)
    if not rows or not saved:
        return None
    stats = RolloutStats(wall_s=saved["wall_s"], env_steps=saved["env_steps"])
    return summarize(rows, RolloutResult(dropped=saved["dropped"], stats=stats), env, folder)
