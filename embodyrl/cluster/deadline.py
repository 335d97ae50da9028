"""A deadline on code that runs in the driver's own thread."""

import faulthandler
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from embodyrl.clock import RunClock

_TICK_S = 1.0
_LAST_RESORT_S = 10


class Abandoned(BaseException):
    """What ran was cut off. Not an `Exception`, because simulators catch those."""


class Deadline:
    """Cuts off what runs too long in the main thread; other threads get no signals, hence no deadline.

    The kernel's timer interrupts whatever waits (sleeps, locks, sockets), and Python carries the handler out between
    two instructions. Only C code that neither returns nor looks for signals goes on, and nothing but `kill` ends it: a
    while later a thread that needs no interpreter lock writes all stacks to standard error. `launcher=local` ends such
    code too.
    """

    def __init__(self) -> None:
        self._clock = RunClock()
        self._limit_s = self._due = math.inf
        self._stoppable = False
        self._watched = -math.inf
        self._works = threading.current_thread() is threading.main_thread()
        if self._works:
            self._before = signal.signal(signal.SIGALRM, self._tick)

    @contextmanager
    def limit(self, seconds: float, *, stoppable: bool) -> Iterator[None]:
        """Raise `Abandoned` in the block after `seconds`, or when it is `stoppable` and `interrupt` is called."""
        if not self._works:
            yield
            return
        self._limit_s, self._due = seconds, self._clock.now() + seconds
        self._watch()
        signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
        self._stoppable = stoppable
        try:
            yield
        finally:
            self._stoppable, self._due = False, math.inf
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def interrupt(self) -> None:
        """Called by a signal's handler: cut off what may be cut off."""
        if self._stoppable:
            raise Abandoned("was interrupted")

    def close(self) -> None:
        """Take the handler and the watch away; idempotent."""
        if self._works:
            self._works = False
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, self._before or signal.SIG_DFL)

    def _tick(self, signum: int, frame: FrameType | None) -> None:
        self._watch()
        # Under a debugger people think for as long as they like.
        if self._clock.now() >= self._due and sys.gettrace() is None:
            raise Abandoned(f"gave no answer for {self._limit_s:g} s")

    def _watch(self) -> None:
        """Put the dump of all stacks off, at most every second, because it costs a thread."""
        if self._clock.now() - self._watched >= _TICK_S:
            self._watched = self._clock.now()
            faulthandler.dump_traceback_later(math.ceil(self._limit_s) + _LAST_RESORT_S, file=2)
