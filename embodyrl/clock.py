"""Time that counts towards a deadline: that in which this process itself ran."""

import time

_LONGEST_S = 1.0
"""Who waits looks at the clock every second; in a longer gap nobody here could have noticed an answer."""


class RunClock:
    """Leaves out freezes: Ctrl-Z and fg, a paused container, a closed lid. One thread looks at it, often."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._ran = 0.0

    def now(self) -> float:
        """Seconds that this process ran since the clock was made, as far as its looks at the clock show."""
        last, self._last = self._last, time.monotonic()
        self._ran += min(self._last - last, _LONGEST_S)
        return self._ran
