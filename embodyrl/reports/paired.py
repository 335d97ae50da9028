"""Paired comparison of two evaluations of the same episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embodyrl.monitor.history import EpisodeRow, group_by_suite
from embodyrl.monitor.intervals import Mean, StateOutcomes, effective_episodes, group_by_state

SIGNIFICANT = 0.05
"""Significance level of a difference between two evaluations."""
_MAX_EXACT = 4000
"""Maximum sum of differences of an exact test, because its time grows with the third power of the sum."""


def mcnemar(differences: Sequence[int]) -> float:
    """Return the two-sided p-value of an exact McNemar test, clustered by initial state.

    `differences` contains one number per initial state: the pairs in which only the second policy succeeded, minus the
    pairs in which only the first policy succeeded. Under the null hypothesis both signs are equally probable, so the
    test randomizes the sign of each state. With one pair per state, this is the binomial test with probability 1/2.
    If more than `_MAX_EXACT` pairs differ, the test uses the normal approximation with continuity correction.

    >>> mcnemar([1] * 9 + [-1]), mcnemar([10, 10])
    (0.021484375, 0.5)
    """
    if sum(map(abs, differences)) > _MAX_EXACT:
        distance = max(abs(sum(differences)) - math.gcd(*differences), 0)
        return math.erfc(distance / math.sqrt(2 * sum(difference**2 for difference in differences)))
    counts_by_sum = Counter({0: 1})
    for size, times in Counter(abs(difference) for difference in differences if difference).items():
        updated: Counter[int] = Counter()
        for total, count in counts_by_sum.items():
            for k in range(times + 1):
                updated[total + size * (2 * k - times)] += count * math.comb(times, k)
        counts_by_sum = updated
    return sum(n for total, n in counts_by_sum.items() if abs(total) >= abs(sum(differences))) / counts_by_sum.total()


def rate_difference(changes: StateOutcomes) -> tuple[float, float]:
    """Return the 95 % interval of the difference between two paired success rates.

    Wald interval with one added success of each policy (Bonett and Price 2012), clustered by initial state.

    Args:
        changes: initial state of each pair, and success of the second policy minus success of the first policy.

    >>> [round(x, 3) for x in rate_difference([(k, 1) for k in range(6)] + [(k, 0) for k in range(6, 50)])]
    [0.013, 0.217]
    """
    groups = group_by_state(changes)
    pairs, n = [change for group in groups for change in group], effective_episodes(groups)
    won, lost = ((n * pairs.count(sign) / len(pairs) + 1) / (n + 2) for sign in (1, -1))
    half_width = 1.96 * math.sqrt((won + lost - (won - lost) ** 2) / (n + 2))
    return max(won - lost - half_width, -1.0), min(won - lost + half_width, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Result of a paired comparison of two policies."""

    suite: str
    """Name of the suite; empty if only one suite was evaluated."""
    pairs: int
    num_states: int
    """Number of distinct initial states of the pairs."""
    only_first: int = 0
    """Number of pairs in which only the first policy succeeded."""
    only_second: int = 0
    p_value: float | None = None
    """p-value of the exact McNemar test; None: the environment reports no success."""
    difference: tuple[float, float] | None = None
    """95 % interval of the difference of success rates (second minus first policy)."""
    gain: Mean | None = None
    """Mean difference of returns (second minus first policy), if success is unknown."""

    @property
    def is_significant(self) -> bool:
        """True if the difference is significant at the 5 % level."""
        if self.gain is not None:
            return not self.gain.interval[0] <= 0.0 <= self.gain.interval[1]
        return self.p_value is not None and self.p_value < SIGNIFICANT

    @property
    def summary(self) -> str:
        """Interval and p-value of the difference, and the number of episodes, as text."""
        if not self.pairs:
            return "no episodes in common"
        bounds = self.gain.interval if self.gain else tuple(100 * bound for bound in self.difference or (-1.0, 1.0))
        low, high = (f"{bound:.4g}" if self.gain else f"{bound:.1f}" for bound in bounds)
        p = "" if self.p_value is None else "p < 0.001, " if self.p_value < 0.001 else f"p = {self.p_value:.2g}, "
        verdict = "" if self.is_significant else "no significant difference, "
        suffix = f" from {self.num_states} initial states" if self.num_states < self.pairs else ""
        return f"95 % interval {low} to {high}, {p}{verdict}{self.pairs} episodes{suffix}"

    def line(self, names: tuple[str, str]) -> str:
        """Return the result as a line of text, with the name of the suite if there are several suites."""
        return f"{self.suite}: " * bool(self.suite) + self.sentence(names)

    def sentence(self, names: tuple[str, str]) -> str:
        """Return the result as a line of text, without the name of the suite."""
        if not self.pairs:
            return "no episodes with the same task, initial state and seed: no paired test"
        line = f"paired on {self.pairs} episodes with the same initial state and seed"
        conclusion = "differ" if self.is_significant else "no significant difference"
        if self.gain is not None:
            return f"{line}: return of {names[1]} minus that of {names[0]}: {self.gain} ({conclusion})"
        test = "McNemar" if self.num_states == self.pairs else f"McNemar over {self.num_states} states"
        low, high = (100 * bound for bound in self.difference or (-1.0, 1.0))
        change = f"{100 * (self.only_second - self.only_first) / self.pairs:+.1f} points [{low:.1f}, {high:.1f}]"
        return (
            f"{line}: success only {names[0]}: {self.only_first}, only {names[1]}: {self.only_second}; {change}; "
            f"{test} p = {self.p_value:.3g} ({conclusion})"
        )


def compare_episodes(first: Sequence[EpisodeRow], second: Sequence[EpisodeRow], suite: str = "") -> PairedComparison:
    """Compare episodes of two evaluations, paired by task, initial state, seed and sample number (`eval.samples`)."""
    # Reset ids count through all evaluated suites; state numbers start at 0 in each suite.
    has_states = all(e.state is not None for e in (*first, *second))
    before, after = (
        _index_by_start(episodes, lambda e: e.state if has_states else e.reset_id) for episodes in (first, second)
    )
    pairs = [(before[start], e) for start, e in after.items() if start in before]
    num_states = len({a.reset_id for a, _ in pairs})
    if pairs and all(e.success_once is None for both in pairs for e in both):
        gain = Mean.of((a.reset_id, b.episode_return - a.episode_return) for a, b in pairs)
        return PairedComparison(suite=suite, pairs=len(pairs), num_states=num_states, gain=gain)
    changes = [(a.reset_id, bool(b.success_once) - bool(a.success_once)) for a, b in pairs]
    by_state: Counter[int] = Counter()
    for state, change in changes:
        by_state[state] += change
    return PairedComparison(
        suite=suite,
        pairs=len(pairs),
        num_states=num_states,
        only_first=sum(change < 0 for _, change in changes),
        only_second=sum(change > 0 for _, change in changes),
        p_value=mcnemar(list(by_state.values())) if pairs else None,
        difference=rate_difference(changes) if pairs else None,
    )


def _index_by_start(
    episodes: Sequence[EpisodeRow], state: Callable[[EpisodeRow], int | None]
) -> dict[tuple[object, ...], EpisodeRow]:
    """Return a mapping from (task, initial state, seed, sample number) to the episode.

    The sample number counts earlier episodes with the same task, initial state and seed.
    """
    episodes_by_start: dict[tuple[object, ...], EpisodeRow] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for e in sorted(episodes, key=lambda e: e.episode):
        start = (e.task, state(e), e.seed)
        episodes_by_start[*start, counts[start]] = e
        counts[start] += 1
    return episodes_by_start


def compare_suites(first: Sequence[EpisodeRow], second: Sequence[EpisodeRow]) -> list[PairedComparison]:
    """Compare two evaluations of one environment, suite by suite; the main suite is first."""
    before, after = group_by_suite(first), group_by_suite(second)
    # An evaluation of one suite does not name the suite.
    names = [next(iter(before)), *list(after)[1:]]
    pairs = zip(names, after.items(), strict=True)
    return [compare_episodes(before.get(name, []), episodes, suite) for name, (suite, episodes) in pairs]
