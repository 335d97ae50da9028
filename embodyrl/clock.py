"""Clock that excludes suspended time, for deadlines."""

import time

_LONGEST_S = 1.0
"""Maximum time counted between two readings, because waiting code reads the clock at least every second."""


class RunClock:
    """Clock without time in which the process was suspended: Ctrl-Z and fg, a paused container, a closed lid.

    One thread must read the clock often.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._ran = 0.0

    def now(self) -> float:
        """Return the seconds that this process has run since the clock was created."""
        last, self._last = self._last, time.monotonic()
        self._ran += min(self._last - last, _LONGEST_S)
        return self._ran
