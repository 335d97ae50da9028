"""Interface and registry of loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from embodyrl import parts
from embodyrl.registry import Registry

ResultRow = tuple[str, str, str, str]
"""Task, result of the first validation, result of the last validation, and change, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Information about the run for loggers."""

    run_id: str
    project: str = "embodyrl"
    offline: bool = False
    """If True, write local files only, without contacting a server."""
    total_steps: int = 0
    """Number of training steps of the whole run; 0 if there is no training."""
    resume_step: int | None = None
    """First step that this process logs; rows that an earlier process wrote for this and later steps are discarded."""
    tasks: Sequence[str] = ()
    """Instruction of each task id of the environment."""


class Monitor:
    """Base class of loggers, whose methods do nothing by default.

    If a method raises an exception, the caller drops the logger.
    """

    prompt: ClassVar[bool] = False
    """True if the logger is called in the training thread. False: a background thread calls the logger, and `banner`,
    `progress` and `results` are not called."""

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Open the logger; an error here ends the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the flat metrics of one step."""

    def video(self, step: int, path: Path) -> None:
        """Log a new video file of a training step."""

    def text(self, line: str) -> None:
        """Log one line of text for the user."""

    def banner(self, lines: Sequence[str]) -> None:
        """Show the banner, a list of lines about the run, before the first step."""

    def progress(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` units of the phase `what` are finished. This method is called often."""

    def results(self, title: str, rows: Sequence[ResultRow]) -> None:
        """Show the results of the first and last validation, at the end of the run."""

    def close(self) -> None:
        """Flush and close; idempotent."""


MONITORS: Registry[type[Monitor]] = Registry(
    "logger",
    group="embodyrl.monitors",
    parts=parts.MONITORS,
    wants="a subclass of embodyrl.monitor.Monitor",
    fits=lambda value: isinstance(value, type) and issubclass(value, Monitor),
)
