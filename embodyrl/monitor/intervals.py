"""Success rates with their confidence intervals, and a test of their difference."""

from __future__ import annotations

import math
from dataclasses import dataclass


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927); z = 1.96 gives 95 %.

    Centre (p + z^2 / 2n) / (1 + z^2 / n), half width z / (1 + z^2 / n) sqrt(p (1 - p) / n + z^2 / 4n^2).
    Without any trial nothing is known: (0, 1).

    >>> [round(x, 4) for x in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} trials: successes must lie between 0 and the trials.")
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z
    centre = p + z2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p value of the exact McNemar test: pairs in which only one of the two succeeded, binomial with 1/2.

    >>> mcnemar(1, 9)
    0.021484375
    """
    n, k = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


@dataclass(frozen=True, slots=True)
class Rate:
    """Successes of some episodes; `episodes` may be 0.

    >>> str(Rate(8, 10) + Rate(0, 10))
    '40.0 % [21.9, 61.3] (8/20)'
    """

    successes: int
    episodes: int

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.successes + other.successes, self.episodes + other.episodes)

    @property
    def value(self) -> float:
        return self.successes / self.episodes if self.episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson, 95 %."""
        return wilson(self.successes, self.episodes)

    def __str__(self) -> str:
        if not self.episodes:
            return "-"
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({self.successes}/{self.episodes})"

    def change(self, later: Rate) -> str:
        """Return the difference to a later rate in percentage points."""
        return f"{100 * (later.value - self.value):+.1f}" if self.episodes and later.episodes else "-"
