"""Success rates and means with 95 % confidence intervals; episodes from one initial state form a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

StateOutcomes = Iterable[tuple[Hashable, float]]
"""(initial state, outcome) of each episode."""


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion (Wilson 1927), with z = 1.96.

    Center (p + z^2 / 2n) / (1 + z^2 / n), half width z / (1 + z^2 / n) sqrt(p (1 - p) / n + z^2 / 4n^2).
    Without trials: (0, 1).

    >>> [round(x, 4) for x in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must be between 0 and n={n}, the number of trials.")
    if n == 0:
        return 0.0, 1.0
    p, z = successes / n, 1.96
    z2 = z * z
    center = p + z2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, (center - half) / (1 + z2 / n)), min(1.0, (center + half) / (1 + z2 / n))


def student_t(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, within 1 % (Fisher and Cornish 1960).

    >>> [round(student_t(n), 2) for n in (1, 2, 4, 9, 99)]
    [12.71, 4.3, 2.77, 2.26, 1.98]
    """
    if degrees_of_freedom <= 2:
        return (math.inf, 12.706, 4.303)[max(degrees_of_freedom, 0)]
    z = 1.96
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / degrees_of_freedom**k for k, term in enumerate(terms, 1))


def effective_episodes(groups: Sequence[Sequence[float]]) -> float:
    """Return the effective number of independent episodes, grouped by initial state.

    The result is the number of episodes divided by the design effect (Kish 1965), with the variance of a ratio over
    clusters and Student's t (Korn and Graubard 1998). It is at most the number of episodes and at least the number of
    initial states.

    >>> effective_episodes([[1, 1, 1, 1], [0, 0, 0, 0]]), effective_episodes([[1], [0], [0]])
    (2, 3)
    """
    n, states = sum(map(len, groups)), len(groups)
    if n == states or states == 1:  # with one state there is no variance between states
        return states
    outcomes = [outcome for group in groups for outcome in group]
    if min(outcomes) == max(outcomes):
        return states
    mean = sum(outcomes) / n
    variance_between = sum((sum(group) - mean * len(group)) ** 2 for group in groups)
    if not variance_between:
        return n
    squares = sum((outcome - mean) ** 2 for outcome in outcomes)  # for successes: n p (1 - p)
    effective_n = squares * n * (states - 1) / (states * variance_between) * (1.96 / student_t(states - 1)) ** 2
    return max(states, min(n, effective_n))


@dataclass(frozen=True, slots=True)
class Rate:
    """Success rate with a 95 % confidence interval; `episodes` may be 0.

    >>> str(Rate(8, 20)), str(Rate.of([("a", 1)] * 10 + [("b", 0)] * 10))
    ('40.0 % [21.9, 61.3] (8/20)', '50.0 % [9.5, 90.5] (10/20, 2 states)')
    """

    successes: int
    episodes: int
    states: int | None = None
    """Number of distinct initial states; None: every episode has its own initial state."""
    effective_n: float | None = None
    """Effective number of independent episodes; None: all episodes."""

    @classmethod
    def of(cls, outcomes: StateOutcomes) -> Rate:
        """Compute the success rate from outcomes; episodes from one initial state form a cluster."""
        groups = group_by_state(outcomes)
        successes = sum(map(sum, groups))
        return cls(round(successes), sum(map(len, groups)), len(groups), effective_episodes(groups))

    @property
    def value(self) -> float:
        """Fraction of successes; 0 without episodes."""
        return self.successes / self.episodes if self.episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval, computed with the effective number of episodes if episodes share initial states."""
        n = self.episodes if self.effective_n is None else self.effective_n
        return wilson(self.value * n, n)

    @property
    def counts(self) -> str:
        """Numbers of successes and episodes as text, with the number of initial states if states are repeated."""
        has_repeated_states = self.states is not None and self.states < self.episodes
        return f"{self.successes}/{self.episodes}" + (f", {self.states} states" if has_repeated_states else "")

    def __str__(self) -> str:
        if not self.episodes:
            return "-"
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({self.counts})"

    @property
    def short(self) -> str:
        """Rate as text, without its interval."""
        return f"{100 * self.value:.1f} %" if self.episodes else "-"

    def change(self, later: Score) -> str:
        """Return the change to a later rate as text, in percentage points."""
        return f"{100 * (later.value - self.value):+.1f}" if self.episodes and later.episodes else "-"


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of a value per episode, such as the return, with a 95 % confidence interval.

    >>> str(Mean.of([("a", 1.0), ("b", 2.0), ("c", 3.0)])), str(Mean.of([("a", 1.0), ("b", 1.0)]))
    ('2 [-0.4843, 4.484] (3 episodes)', '1 (2 episodes, all equal)')
    """

    value: float
    interval: tuple[float, float]
    episodes: int
    states: int
    effective_n: float | None = None
    """Effective number of independent episodes (see `Rate.effective_n`)."""

    @classmethod
    def of(cls, outcomes: StateOutcomes) -> Mean:
        """Compute the mean and its Student's t interval, with the initial states as clusters."""
        groups = group_by_state(outcomes)
        n, states = sum(map(len, groups)), len(groups)
        value, effective_n = sum(map(sum, groups)) / n if n else 0.0, effective_episodes(groups)
        if states < 2:
            return cls(value, (-math.inf, math.inf), n, states, effective_n)
        sum_of_squares = sum((sum(group) - value * len(group)) ** 2 for group in groups)
        half = student_t(states - 1) * math.sqrt(states / (states - 1) * sum_of_squares) / n
        return cls(value, (value - half, value + half), n, states, effective_n)

    @property
    def counts(self) -> str:
        """Number of episodes as text, with the number of initial states if states are repeated."""
        return f"{self.episodes} episodes" + (f", {self.states} states" if self.states < self.episodes else "")

    def __str__(self) -> str:
        if not self.episodes:
            return "-"
        low, high = self.interval
        if low == high:  # no variance, so no confidence interval
            return f"{self.value:.4g} ({self.counts}, all equal)"
        return f"{self.value:.4g} [{low:.4g}, {high:.4g}] ({self.counts})"

    @property
    def short(self) -> str:
        """Mean as text, without its interval."""
        return f"{self.value:.4g}" if self.episodes else "-"

    def change(self, later: Score) -> str:
        """Return the change to a later mean as text."""
        return f"{later.value - self.value:+.4g}" if self.episodes and later.episodes else "-"


Score = Rate | Mean
"""Score of an evaluation: success rate, or mean return if the environment reports no success."""


def group_by_state(outcomes: StateOutcomes) -> list[list[float]]:
    """Return the outcomes of each initial state."""
    groups: defaultdict[Hashable, list[float]] = defaultdict(list)
    for state, outcome in outcomes:
        groups[state].append(float(outcome))
    return list(groups.values())
