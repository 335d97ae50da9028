"""A polite end: signals become a request that the loop checks where it can stop."""

import signal
from collections.abc import Callable, Iterator
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

    @contextmanager
    def listening(self, on_second: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP as requests; a second one acts at once, after `on_second`."""

        def note(signum: int, frame: object) -> None:
            if self._signum is not None:
                on_second()
                raise KeyboardInterrupt
            # A lost terminal means the same as a request to terminate.
            self._signum = signal.SIGTERM if signum == signal.SIGHUP else signum

        previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
