"""A polite end for loops that have no workers to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from embodyrl.errors import Interrupted


class StopRequest:
    """Remembers a signal until the loop reaches a point where it can stop."""

    def __init__(self) -> None:
        self._signum: int | None = None

    def check(self) -> None:
        """Call between steps.

        Raises:
            Interrupted: a signal arrived.
        """
        if self._signum is not None:
            raise Interrupted(self._signum)

    def note(self, signum: int, frame: object) -> None:
        """Signal handler; a second signal acts at once."""
        if self._signum is not None:
            raise KeyboardInterrupt
        # A lost terminal means the same as a request to terminate.
        self._signum = signal.SIGTERM if signum == signal.SIGHUP else signum


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGHUP into a request that the loop checks."""
    request = StopRequest()
    previous = {s: signal.signal(s, request.note) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
