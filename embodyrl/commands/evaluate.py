"""Evaluation as a command of its own: no optimizer, a table, and videos."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.commands.evaluation import EvalResult, run_evaluation
from embodyrl.commands.facts import facts
from embodyrl.commands.run_folder import open_run, resolve_weights
from embodyrl.commands.session import LOOP_FILE, announce, screen_only
from embodyrl.config.trust import resume_word
from embodyrl.errors import ConfigError, Interrupted, WorkerError
from embodyrl.monitor.fanout import Fanout
from embodyrl.plan.blueprint import draw_blueprint
from embodyrl.plan.held_out import evaluation_facts
from embodyrl.plan.roots import EvalConfig
from embodyrl.scheduler.start import start_workers


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
        workers = start_workers(blueprint, folder.logs, monitor.text, start_from=weights)
        try:
            with workers.supervisor.signals():
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
        finally:
            workers.close()
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
