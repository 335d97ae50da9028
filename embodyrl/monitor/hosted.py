"""What loggers with a server behind them share: the run's settings, and nothing for plain lines."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar

import yaml

from embodyrl.monitor.protocol import RunInfo


class HostedMonitor:
    """Subclasses name the package that they need and implement `open` and `log`."""

    requires: ClassVar[str]
    """Importable package; checked before a run starts."""

    def __init__(self) -> None:
        self._run: Any = None

    @property
    def _package(self) -> Any:
        return importlib.import_module(self.requires)

    def video(self, step: int, path: Path) -> None:
        """Videos stay files, unless the service shows them."""

    def text(self, line: str) -> None:
        """Lines for people go to the console and to the run's events."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The run's config, as services show it beside the curves."""
    file = run_dir / "config.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def resumes(info: RunInfo) -> bool:
    """Whether this process goes on with a run that an earlier one has begun."""
    return bool(info.resume_step)
