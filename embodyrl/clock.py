"""Deadlines: a clock that excludes suspended time, and a time limit for a block of code."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_S = 1.0
"""Maximum time in seconds counted between two readings; a longer gap means that the process was suspended."""


class RunClock:
    """Clock that stops while the process is suspended, for example by Ctrl-Z, a paused container or a closed laptop.

    One thread must read the clock at least once per second.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._ran = 0.0

    def now(self) -> float:
        """Return the number of seconds that this process has run since the clock was created."""
        last, self._last = self._last, time.monotonic()
        self._ran += min(self._last - last, _LONGEST_S)
        return self._ran


@contextmanager
def raise_after(seconds: float, error: Exception, *, counts_cpu_time: bool = False) -> Iterator[None]:
    """Raise `error` in the block after `seconds`, if the current thread is the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise error

    timer = signal.ITIMER_VIRTUAL if counts_cpu_time else signal.ITIMER_REAL
    signum = signal.SIGVTALRM if counts_cpu_time else signal.SIGALRM
    previous_handler = signal.signal(signum, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0.0)
        signal.signal(signum, previous_handler)
