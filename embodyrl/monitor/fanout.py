"""Fan-out to multiple loggers. A logger that fails at the start ends the run; a logger that fails later is dropped."""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from embodyrl.errors import ConfigError, UnknownNameError, masked
from embodyrl.monitor.intervals import Score
from embodyrl.monitor.protocol import MONITORS, Monitor, RunInfo

_BACKLOG = 1000
"""Maximum number of queued calls."""


class BackgroundMonitor(Monitor):
    """Logger that forwards calls to another logger in a background thread; errors are raised by the next call."""

    def __init__(self, monitor: Monitor, *, patience_s: float = 120.0, close_s: float = 30.0) -> None:
        """Wrap `monitor`; `patience_s` limits one call, and `close_s` the final flush."""
        self._monitor = monitor
        self._patience_s, self._close_s = patience_s, close_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_BACKLOG)
        self._failure: Exception | None = None
        self._since = float("inf")
        """Start time of the running call."""
        self._thread = threading.Thread(target=self._work, name="logger", daemon=True)

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Start the thread and open the logger in it; return when the logger is open or timed out."""
        opened = threading.Event()
        self._calls.put(partial(self._monitor.open, run_dir, info))
        self._calls.put(opened.set)
        self._thread.start()
        while not opened.wait(0.02):
            self._check()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Monitor.log`."""
        self._hand_on(partial(self._monitor.log, step, dict(metrics)))

    def video(self, step: int, path: Path) -> None:
        """See `Monitor.video`."""
        self._hand_on(partial(self._monitor.video, step, path))

    def text(self, line: str) -> None:
        """See `Monitor.text`."""
        self._hand_on(partial(self._monitor.text, line))

    def close(self) -> None:
        """See `Monitor.close`."""
        if self._thread.ident is None:
            return
        if self._thread.is_alive():
            self._hand_on(self._monitor.close)
            self._hand_on(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the last calls did not finish within {self._close_s:g} s and are lost")
        if self._failure is not None:
            raise self._failure

    def _hand_on(self, call: Callable[[], None] | None) -> None:
        self._check()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"the logger is too slow: {_BACKLOG} calls are queued") from None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._since > self._patience_s:
            raise TimeoutError(f"one call takes longer than {self._patience_s:g} s")

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                self._since = time.monotonic()
                call()
                self._since = float("inf")
        except Exception as error:
            self._failure = error


_log = logging.getLogger(__name__)


def missing_loggers(backends: Sequence[str]) -> list[str]:
    """Return one line for each backend that does not exist or lacks its package."""
    problems: list[str] = []
    for name in backends:
        try:
            package = getattr(MONITORS.get(name), "requires", None)
        except UnknownNameError as error:
            problems.append(f"runner.logger.backends: {error}")
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            problems.append(
                f"runner.logger.backends: '{name}' needs a package that is not installed: pip install {package}. "
                f"Or leave '{name}' out of the list."
            )
    return problems


def build_monitor(backends: Sequence[str]) -> Fanout:
    """Build the named backends (`runner.logger.backends`) without opening them.

    Raises:
        UnknownNameError: a backend does not exist.
    """
    monitors = {name: MONITORS.get(name)() for name in dict.fromkeys(backends)}
    return Fanout({name: m if m.prompt else BackgroundMonitor(m) for name, m in monitors.items()})


class Fanout(Monitor):
    """Logger that forwards to several loggers by backend name."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self._monitors = dict(monitors)

    def names(self) -> list[str]:
        """Return the names of the active backends."""
        return list(self._monitors)

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Open all backends.

        Raises:
            ConfigError: a backend failed to start; backends that were already open are closed.
        """
        opened: dict[str, Monitor] = {}
        for name, monitor in self._monitors.items():
            try:
                monitor.open(run_dir, info)
            except Exception as error:
                # Close only the backends that were opened.
                self._monitors = opened
                self.close()
                raise ConfigError(
                    f"runner.logger.backends: '{name}' cannot start in {run_dir}: {_one_line(error)} "
                    f"Fix the problem, or remove '{name}' from the list."
                ) from error
            opened[name] = monitor

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all loggers."""
        self._each(lambda monitor: monitor.log(step, metrics))

    def video(self, step: int, path: Path) -> None:
        """Pass a video to all loggers."""
        self._each(lambda monitor: monitor.video(step, path))

    def text(self, line: str) -> None:
        """Pass a line to all loggers."""
        self._each(lambda monitor: monitor.text(masked(line)))

    def banner(self, lines: Sequence[str]) -> None:
        """Pass the banner to all loggers."""
        self._each(lambda monitor: monitor.banner([masked(line) for line in lines]))

    def progress(self, done: int, total: int, what: str) -> None:
        """Pass progress to all loggers."""
        self._each(lambda monitor: monitor.progress(done, total, what))

    def results(self, rows: Sequence[tuple[str, Score, Score]]) -> None:
        """Pass a table of results to all loggers."""
        self._each(lambda monitor: monitor.results(rows))

    def close(self) -> None:
        """Close all loggers."""
        self._each(lambda monitor: monitor.close())

    def _each(self, call: Callable[[Monitor], None]) -> None:
        failed: list[str] = []
        for name, monitor in list(self._monitors.items()):
            try:
                call(monitor)
            except Exception as error:
                del self._monitors[name]
                failed.append(f"logger '{name}' failed and was dropped; training continues: {_one_line(error)}")
        for message in failed:
            _log.warning(message)
            # The warning goes to the other loggers, too; those that fail now are also dropped.
            self.text(f"warning: {message}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ") + "."
