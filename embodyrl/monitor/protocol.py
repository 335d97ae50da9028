"""The monitor seam: what a backend implements, and one registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from embodyrl.monitor.intervals import Score
from embodyrl.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a monitor learns about the run when it opens."""

    run_id: str
    project: str = "embodyrl"
    offline: bool = False
    """Write files only, contact no server."""
    total_steps: int = 0
    """Training steps of the whole run; 0 if there is no training."""
    resume_step: int | None = None
    """First step that this process will log; rows of this and later steps of an earlier process are void."""
    tasks: Sequence[str] = ()
    """Instruction of each task id of the environment."""
    summary: Mapping[str, str] = field(default_factory=dict)
    """A few lines about the configuration, name to value."""


class Monitor:
    """One backend: a subclass implements what it serves. Methods may raise: the caller drops the backend."""

    prompt: ClassVar[bool] = False
    """The caller waits for each call; others get theirs, but for what only people at a screen want, in a thread."""

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Start; an error here is fatal for the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the flat metrics of one step."""

    def video(self, step: int, path: Path) -> None:
        """A recording was written."""

    def text(self, line: str) -> None:
        """One human-readable line."""

    def banner(self, lines: Sequence[str]) -> None:
        """Lines before the first step."""

    def progress(self, done: int, total: int, what: str) -> None:
        """`done` of `total` parts of a long phase are finished; called often."""

    def results(self, rows: Sequence[tuple[str, Score, Score]]) -> None:
        """Success, or return, in the first and the last validation by task, at the end."""

    def close(self) -> None:
        """Flush and end; idempotent."""


MONITORS: Registry[type[Monitor]] = Registry(
    "logger",
    group="embodyrl.monitors",
    wants="a subclass of embodyrl.monitor.Monitor",
    fits=lambda found: isinstance(found, type) and issubclass(found, Monitor),
)
