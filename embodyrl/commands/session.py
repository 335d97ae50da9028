"""Code shared by all training commands: banner, checkpoints, and step counter."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from embodyrl.checkpoint.store import LOOP_FILE, CheckpointStore, read_loop
from embodyrl.clock import RunClock
from embodyrl.commands.run_folder import CONFIG_FILE, RunFolder
from embodyrl.config.compose import flatten
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.trust import format_shell_command
from embodyrl.errors import CheckpointError, Interrupted, WorkerError
from embodyrl.files import is_full_disk, write_atomically
from embodyrl.monitor.console import LABEL_WIDTH
from embodyrl.monitor.group import MonitorGroup, build_monitor
from embodyrl.monitor.history import METRICS_FILE, METRICS_LOGGER, count_missing_rows, read_rows
from embodyrl.monitor.protocol import RunInfo
from embodyrl.plan.saved import changed_settings, save_config
from embodyrl.plan.schema import Config
from embodyrl.plan.settings import OnSaveError
from embodyrl.scheduler.start import RunningWorkers
from embodyrl.version import __version__

SAVE_EVERY_S = 300.0
"""Maximum number of seconds without a checkpoint, unless only the last step is saved."""
_LONG_SAVE_S = 15.0
"""Duration of a save, in seconds, above which checkpoints between the intervals are written less often."""

W = TypeVar("W", bound=RunningWorkers)

OnStep = Callable[[int, Mapping[str, float]], bool | None]
"""Callback with the number of completed steps and the metrics of the last step. The result True ends the run: a
checkpoint is written, and the training function returns."""

BannerLines = Sequence[tuple[str, str]]
"""Banner lines as (label, text)."""


def build_console_monitor(cfg: Config) -> MonitorGroup:
    """Build a monitor with only the console backend, for commands that log no training steps."""
    return build_monitor([name for name in cfg.runner.logger.backends if name == "console"])


def print_banner(
    monitor: MonitorGroup,
    cfg: Config,
    folder: RunFolder,
    command: str,
    banner_lines: BannerLines,
    *,
    tasks: Sequence[str] = (),
    total: int = 0,
    resumed: int = 0,
) -> None:
    """Open the monitor and print the banner; `resumed` is the step from which a run resumes."""
    info = RunInfo(
        run_id=folder.root.name,
        project=getattr(cfg.runner.logger, "project_name", "embodyrl"),
        offline=getattr(cfg.runner.logger, "offline", False),
        total_steps=total,
        resume_step=resumed + 1 if resumed else (0 if total else None),
        tasks=tasks,
    )
    monitor.open(folder.root, info)
    head = f"embodyrl {__version__} · {command} · seed {cfg.seed}"
    head += f" · resumed at step {resumed}" if resumed else ""
    monitor.banner([head, *(f"  {name:<{LABEL_WIDTH}} {text}" for name, text in banner_lines)])
    monitor.progress(0, 0, "starting workers")


class Session:
    """State of a training run: step counter, best score, monitor and checkpoints."""

    def __init__(self, cfg: Config, folder: RunFolder, command: str, log_interval: int = 1) -> None:
        self.cfg = cfg
        self.folder = folder
        self.monitor = build_monitor(cfg.runner.logger.backends)
        self.step = 0
        self.total = 0
        self._command = command
        self._log_interval = log_interval
        self._best: list[float] | None = None
        self._best_step: int | None = None
        self._store = CheckpointStore(folder.checkpoints)
        self._store.clean_stale()
        self._warnings = self._store.rename_damaged()
        self.restarts = 0
        """Number of env worker restarts in earlier processes of the run."""
        self._last_row: dict[str, Any] = {}
        self._in_callback = False
        """True while a user's callback runs, and after a callback raised an exception."""
        # One thread, so that checkpoints are committed in order.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending_save: Future[None] | None = None
        self._next_save = time.monotonic() + SAVE_EVERY_S
        self._temporary: list[int] = []
        """Step of the last checkpoint if it is not a multiple of `runner.save_interval`; the next save replaces it."""

    def restore_newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint and restore step counter and best score from it; None: start at step 0.

        Raises:
            CheckpointError: the newest checkpoint is damaged (older checkpoints are never used instead), or missing.
        """
        latest, rows = self._store.latest(), read_rows(self.folder.root / METRICS_FILE)
        if latest is None:
            interval = self.cfg.runner.save_interval
            newest = max((row.get("step", 0) for row in rows), default=0)
            # The checkpoint folder is created at the start of a run. The rows of a step are written before its
            # checkpoint, which may be pending for one more interval.
            is_deleted = newest and not self._store.root.is_dir()
            is_late = -1 < interval * (1 + self.cfg.checkpoint.async_save) < newest
            if self._warnings or is_deleted or is_late:
                raise CheckpointError(
                    f"{self.folder.root} has {len(rows)} rows of metrics but no checkpoint in {self._store.root} to "
                    f"resume from{''.join(f'; {line}' for line in self._warnings)}. Restore the checkpoints, choose a "
                    f"new runner.experiment_name, or delete {METRICS_FILE} to start from step 0."
                )
            if newest:
                self._warnings.append("no checkpoint was complete when this run ended")
            return None
        self._store.verify(latest)
        self.step, self._best, self._best_step = read_loop(latest)
        # Rows of steps after the checkpoint are from an interrupted attempt; these steps are repeated.
        earlier = [row for row in rows if row.get("step", 0) <= self.step]
        self._last_row = earlier[-1] if earlier and earlier[-1].get("step") == self.step else {}
        self.restarts = int(earlier[-1].get("env/restarts") or 0) if earlier else 0
        if changes := self._find_config_changes(latest / CONFIG_FILE):
            self._warnings.append(f"{CONFIG_FILE} was changed since step {self.step}: {', '.join(changes)}")
        missing = count_missing_rows(earlier, self.step, self._log_interval)
        if missing and METRICS_LOGGER in self.cfg.runner.logger.backends:
            self._warnings.append(
                f"{METRICS_FILE} has no rows of {missing} earlier training steps, so reports omit these steps"
            )
        return latest

    def _find_config_changes(self, saved: Path) -> list[str]:
        """Return the settings that differ from those of a checkpoint, except settings on the command line."""
        if not saved.is_file():  # a checkpoint of an earlier version
            return []
        changes = changed_settings(read_plain_yaml(self.folder.root / CONFIG_FILE), flatten(read_plain_yaml(saved)))
        return [
            f"{key}={value} (was {old})"
            for key, value, old in changes
            if key != "trust" and not self.cfg.is_set_by_user(key)
        ]

    def interrupted_validation_metrics(self, interval: int) -> dict[str, float]:
        """Return the metrics of the resumed step if its validation was interrupted, else an empty mapping.

        The step is logged again with the results.
        """
        row = {name: math.nan if value is None else value for name, value in self._last_row.items() if name != "step"}
        return row if self.step and self.is_due(interval) and "time/validate" not in row else {}

    def print_banner(self, banner_lines: BannerLines, total: int, tasks: Sequence[str] = ()) -> None:
        """Open the monitor and print the banner of a run of `total` steps."""
        self.total = total
        self._store.root.mkdir(exist_ok=True)
        resumed = self.step
        print_banner(
            self.monitor, self.cfg, self.folder, self._command, banner_lines, tasks=tasks, total=total, resumed=resumed
        )
        for line in self._warnings:
            self.monitor.text(f"warning: {line}; training continues from step {self.step}")
        if self.step >= total:
            # The run may have ended by the number of epochs instead of steps.
            limits = "runner.max_steps" if self.cfg.runner.max_epochs < 0 else "runner.max_epochs or runner.max_steps"
            self.monitor.text(f"no training steps are left: the run is at step {self.step} of {total}; raise {limits}")

    @contextmanager
    def running(self, start: Callable[[], W]) -> Iterator[W]:
        """Start the workers for a block; stop the workers and close the monitor after the block.

        Raises:
            Interrupted: a signal arrived during the start.
        """
        try:
            try:
                workers = start()
            except Interrupted as interruption:
                raise self.add_stop_message(interruption) from None
            with workers.running():
                yield workers
        finally:
            self.monitor.close()

    def is_due(self, interval: int) -> bool:
        """Return True every `interval` steps and after the last step; False if `interval` is -1."""
        return interval != -1 and (self.step % interval == 0 or self.step == self.total)

    def run_callback(self, callback: Callable[[int, Any], bool | None] | None, value: Any) -> None:
        """Call a user's callback, if given; the run ends after this step if the callback returns True."""
        if callback is None:
            return
        self._in_callback = True
        result: object = callback(self.step, value)
        self._in_callback = False
        # Numpy booleans count, too: `np.mean(returns) > 0.9` is not a `bool`.
        if isinstance(result, (bool, np.bool_)) and result and self.step < self.total:
            self.monitor.text(f"step {self.step}: a callback ended the run")
            self.total = self.step

    @contextmanager
    def save_on_interrupt(self, save: Callable[[], Path]) -> Iterator[None]:
        """Save a checkpoint if a signal, lost env workers, a full disk, or an error of a callback ends the block."""
        try:
            yield
        except Interrupted as interruption:
            raise self.add_stop_message(interruption, save()) from None
        except WorkerError as error:
            saved = None
            if error.actors_reply and self.step:
                try:
                    path = save()
                    self.wait_for_save()
                    saved = path
                except (WorkerError, CheckpointError, OSError) as save_error:  # for example, a rank is lost, too
                    self.monitor.text(f"warning: step {self.step} could not be saved: {save_error}")
            state = "there is no checkpoint"
            if checkpoint := saved or self._store.latest():
                state = f"{'saved' if saved else 'the newest checkpoint is'} {checkpoint}"
            error.args = (f"{error}\n{state}; {self.folder.resume_line}",)
            raise
        except Exception as error:
            # An error of the caller or a full disk: the trained weights are intact.
            is_unsaved = is_full_disk(error) and not isinstance(error, CheckpointError)
            if self.step and (self._in_callback or is_unsaved):
                saved = save()
                self.wait_for_save()
                if self._in_callback:
                    command = f"embodyrl.{self._command}"
                    error.add_note(f"raised by a callback of {command} after step {self.step}; saved {saved}")
            raise

    def record_score(self, *score: float) -> None:
        """Record a validation score and its step if the score is higher than all earlier scores.

        Steps without a checkpoint, such as step 0, are ignored.
        """
        if self.step and self.is_due(self.cfg.runner.save_interval) and (self._best is None or [*score] > self._best):
            self._best, self._best_step = [*score], self.step

    def save(self, write_state: Callable[[Path], None], meta: Mapping[str, Any]) -> Path:
        """Write the checkpoint of the current step if it is missing, delete old checkpoints, and return the path.

        With `checkpoint.async_save` the checkpoint is complete when `wait_for_save` returns.
        """
        self._warn_on_error(self.wait_for_save)
        if self.folder.restore():
            self.monitor.text(
                f"warning: {self.folder.root} was deleted during the run. Its config was written again, but earlier "
                "metrics, evaluations and checkpoints are lost."
            )
        path = self._store.path(self.step)
        if self.step in self._store.steps():
            return path
        loop = {"step": self.step, "best": self._best, "best_step": self._best_step, "version": __version__}

        def write(folder: Path) -> None:
            write_state(folder)
            write_atomically(folder / LOOP_FILE, json.dumps(loop, indent=2) + "\n")
            save_config(self.cfg, folder / CONFIG_FILE)

        self._store.stage(self.step, write)
        protect = [self._best_step] if self.cfg.checkpoint.keep_best and self._best_step is not None else []
        self._pending_save = self._writer.submit(self._commit, self.step, meta, protect, self._temporary)
        if not self.cfg.checkpoint.async_save:
            self.wait_for_save()
        return path

    def _commit(self, step: int, meta: Mapping[str, Any], protect: Sequence[int], replaced: Sequence[int]) -> None:
        self._store.commit(step, meta)
        self._store.prune(self.cfg.checkpoint.keep, protect, replaced)

    def wait_for_save(self, *, wait: bool = True) -> None:
        """Raise the error of the last asynchronous save, if any; if `wait`, first wait until the save is complete.

        Raises:
            CheckpointError: the checkpoint could not be written, or takes longer than `faults.update_timeout_s`.
        """
        if self._pending_save is None or not (wait or self._pending_save.done()):
            return
        limit, saving, self._pending_save = self.cfg.faults.update_timeout_s, self._pending_save, None
        clock = RunClock()
        while not futures.wait([saving], 1.0).done:
            if clock.now() > limit:
                raise CheckpointError(
                    f"{self._store.root}: a checkpoint was not written to disk within {limit:g} s "
                    "(faults.update_timeout_s). Check the file system."
                )
        saving.result()

    def save_if_due(self, save: Callable[[], Path]) -> None:
        """Save a checkpoint every `runner.save_interval` steps, and after some minutes without a checkpoint.

        A checkpoint between two intervals is replaced by the next checkpoint. The caller saves after the last step.
        """
        self._warn_on_error(partial(self.wait_for_save, wait=False))
        interval, started = self.cfg.runner.save_interval, time.monotonic()
        is_late = interval != -1 and started >= self._next_save
        if self.step < self.total and (is_late or self.is_due(interval)):
            self._warn_on_error(save)
            saved = time.monotonic()
            self._next_save = saved + SAVE_EVERY_S * max(1.0, (saved - started) / _LONG_SAVE_S)
            self._temporary = [] if self.is_due(interval) else [self.step]

    def _warn_on_error(self, action: Callable[[], object]) -> None:
        """Call `action`; a CheckpointError becomes a warning if `checkpoint.on_error=continue`."""
        try:
            action()
        except (CheckpointError, OSError) as error:
            if self.cfg.checkpoint.on_error == OnSaveError.stop:
                raise
            self.monitor.text(f"warning: a checkpoint could not be written, training continues: {error}")

    def add_stop_message(self, interruption: Interrupted, saved: Path | None = None) -> Interrupted:
        """Wait for a pending save; set the interruption's message to signal, step, checkpoint and resume command."""
        self.wait_for_save()
        interruption.args = (
            f"stopped by {signal.Signals(interruption.signum).name} after step {self.step}; "
            f"{f'saved {saved}; ' if saved else ''}{self.folder.resume_line}",
        )
        return interruption

    def print_summary(self, checkpoint: Path, *commands: Sequence[str], more: BannerLines = ()) -> None:
        """Print the path of the final checkpoint and the lines `more`, and suggest commands for the next steps."""
        suggestions = [format_shell_command(command, self.cfg) for command in commands]
        for label, text in (("checkpoint", checkpoint), *more, *zip(("next", "", ""), suggestions, strict=False)):
            self.monitor.text(f"{label:<{LABEL_WIDTH}} {text}")
