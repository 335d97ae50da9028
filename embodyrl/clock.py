"""Clock that excludes suspended time, for deadlines."""

import time

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
