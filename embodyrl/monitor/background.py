"""Loggers in background threads, so that a slow logger does not delay the training."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from embodyrl.monitor.protocol import Monitor, RunInfo

_MAX_QUEUED_CALLS = 1000
"""Maximum number of queued calls."""


class BackgroundMonitor(Monitor):
    """Logger that runs another logger in a background thread, and raises that logger's exception in the next call."""

    def __init__(self, monitor: Monitor, *, call_timeout_s: float = 120.0, close_timeout_s: float = 30.0) -> None:
        """Wrap `monitor`; the arguments are the time limits of one call and of the final flush."""
        self._monitor = monitor
        self._call_timeout_s, self._close_timeout_s = call_timeout_s, close_timeout_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_QUEUED_CALLS)
        self._failure: Exception | None = None
        self._call_start = float("inf")
        """Start time of the running call, from `time.monotonic`; infinity between calls."""
        self._thread = threading.Thread(target=self._run, name="logger", daemon=True)

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Start the thread, and wait until it has opened the logger.

        Raises:
            TimeoutError: the logger is not open after `call_timeout_s`.
        """
        opened = threading.Event()
        self._calls.put(partial(self._monitor.open, run_dir, info))
        self._calls.put(opened.set)
        self._thread.start()
        while not opened.wait(0.02):
            self._check()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a call of `Monitor.log`."""
        self._enqueue(partial(self._monitor.log, step, dict(metrics)))

    def video(self, step: int, path: Path) -> None:
        """Queue a call of `Monitor.video`."""
        self._enqueue(partial(self._monitor.video, step, path))

    def text(self, line: str) -> None:
        """Queue a call of `Monitor.text`."""
        self._enqueue(partial(self._monitor.text, line))

    def close(self) -> None:
        """Close the logger after all queued calls.

        Raises:
            TimeoutError: the queued calls did not finish within `close_timeout_s`.
        """
        if self._thread.ident is None:
            return
        if self._thread.is_alive():
            self._enqueue(self._monitor.close)
            self._enqueue(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the logger did not process its queue within {self._close_timeout_s:g} s; queued data is lost"
            )
        if self._failure is not None:
            raise self._failure

    def _enqueue(self, call: Callable[[], None] | None) -> None:
        self._check()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"the logger is too slow: its queue is full ({_MAX_QUEUED_CALLS} calls)") from None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._call_start > self._call_timeout_s:
            raise TimeoutError(f"a call to the logger has not finished within {self._call_timeout_s:g} s")

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                self._call_start = time.monotonic()
                call()
                self._call_start = float("inf")
        except Exception as error:
            self._failure = error
