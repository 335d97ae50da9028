"""Confidence intervals of success rates, and a test of their difference."""

from __future__ import annotations

import math


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
