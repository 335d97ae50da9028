"""Fan-out to multiple loggers. A logger that fails at the start ends the run; a logger that fails later is dropped."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from embodyrl.errors import ConfigError, clean_text
from embodyrl.monitor.background import BackgroundMonitor
from embodyrl.monitor.protocol import MONITORS, Monitor, ResultRow, RunInfo
from embodyrl.registry import name_problems

_log = logging.getLogger(__name__)


def find_logger_problems(backends: Sequence[str]) -> list[str]:
    """Return an error for each logger that does not exist or whose package is not installed."""
    key = "runner.logger.backends"
    if problems := name_problems(key, backends, MONITORS.get):
        return problems
    packages = {name: getattr(MONITORS.get(name), "requires", None) for name in backends}
    return [
        f"{key}: '{name}' needs a package that is not installed. Run `pip install {package}`, or remove '{name}' from "
        "the list."
        for name, package in packages.items()
        if package is not None and importlib.util.find_spec(package) is None
    ]


def build_monitor(backends: Sequence[str]) -> MonitorGroup:
    """Create the loggers in `runner.logger.backends` without opening them.

    Raises:
        UnknownNameError: a logger does not exist.
    """
    monitors = {name: MONITORS.get(name)() for name in dict.fromkeys(backends)}
    return MonitorGroup({name: m if m.prompt else BackgroundMonitor(m) for name, m in monitors.items()})


class MonitorGroup(Monitor):
    """Logger that forwards every call to several loggers."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self.monitors = dict(monitors)
        """Active loggers by name."""

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Open all loggers.

        Raises:
            ConfigError: a logger failed to start; loggers that were already open are closed.
        """
        info = replace(info, tasks=[clean_text(task) for task in info.tasks])
        opened: dict[str, Monitor] = {}
        for name, monitor in self.monitors.items():
            try:
                monitor.open(run_dir, info)
            except Exception as error:
                # Close only the backends that were opened.
                self.monitors = opened
                self.close()
                raise ConfigError(
                    f"runner.logger.backends: '{name}' cannot start in {run_dir}: {_format_error(error)} "
                    f"Fix the problem, or remove '{name}' from the list."
                ) from error
            opened[name] = monitor

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all loggers."""
        self._call_all(lambda monitor: monitor.log(step, metrics))

    def video(self, step: int, path: Path) -> None:
        """Pass a video to all loggers."""
        self._call_all(lambda monitor: monitor.video(step, path))

    def text(self, line: str) -> None:
        """Pass a line to all loggers."""
        self._call_all(lambda monitor: monitor.text(clean_text(line)))

    def banner(self, lines: Sequence[str]) -> None:
        """Pass the banner to all loggers."""
        self._call_all(lambda monitor: monitor.banner([clean_text(line) for line in lines]))

    def progress(self, done: int, total: int, what: str) -> None:
        """Pass the progress of a phase to all loggers."""
        self._call_all(lambda monitor: monitor.progress(done, total, what))

    def results(self, title: str, rows: Sequence[ResultRow]) -> None:
        """Pass a table of results to all loggers."""
        cleaned = [(clean_text(task), first, last, change) for task, first, last, change in rows]
        self._call_all(lambda monitor: monitor.results(title, cleaned))

    def close(self) -> None:
        """Close all loggers."""
        self._call_all(lambda monitor: monitor.close())

    def _call_all(self, call: Callable[[Monitor], None]) -> None:
        failed: list[str] = []
        for name, monitor in list(self.monitors.items()):
            try:
                call(monitor)
            except Exception as error:
                del self.monitors[name]
                failed.append(f"logger '{name}' failed and was dropped; training continues: {_format_error(error)}")
        for message in failed:
            _log.warning(message)
            # The other loggers also receive the warning; a logger that fails to log it is dropped as well.
            self.text(f"warning: {message}")


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ") + "."
