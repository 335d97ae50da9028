"""A polite end: signals become a request that the loop checks where it can stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from embodyrl.errors import Interrupted, StoppedAtOnce


class StopRequest:
    """Remembers a signal until the loop reaches a point where it can stop."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._looked = False

    def looked(self) -> bool:
        """Whether SIGUSR1 has asked for the state since the last call."""
        looked, self._looked = self._looked, False
        return looked

    def check(self) -> None:
        """Call between steps.

        Raises:
            Interrupted: a signal arrived.
        """
        if self._signum is not None:
            raise Interrupted(self._signum)

    @contextmanager
    def listening(
        self, on_first: Callable[[], None] = lambda: None, on_second: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP as requests; a second one acts at once, after `on_second`.

        SIGHUP stays ignored where it is (nohup). SIGUSR1 is remembered for `looked`.
        """

        def note(signum: int, frame: object) -> None:
            # A lost terminal means the same as a request to terminate.
            signum = signal.SIGTERM if signum == signal.SIGHUP else signum
            if self._signum is not None:
                on_second()
                raise StoppedAtOnce(signum)
            self._signum = signum
            on_first()

        def look(signum: int, frame: object) -> None:
            self._looked = True

        wanted = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGHUP: note, signal.SIGUSR1: look}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del wanted[signal.SIGHUP]
        previous = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
