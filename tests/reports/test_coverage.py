"""Coverage of the 95 % intervals by simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embodyrl.monitor.intervals import Mean, Rate
from embodyrl.reports.paired import rate_difference
from embodyrl.reports.seeds import (
    MIN_BOOTSTRAP_RUNS,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
    stratified_bootstrap,
)

STATISTICS = Path(__file__).parents[2] / "docs" / "results" / "statistics.md"
Interval = tuple[float, float]
Draw = Callable[[np.random.Generator], tuple[float, Interval]]
"""One simulated experiment: the true value and the interval."""

MIDDLE = float(interquartile_mean(np.random.default_rng(5).normal(size=(200_000, 5)) * 0.1 + np.arange(5) * 0.05))


def rate(rng: np.random.Generator, episodes: int, low: float = 0.05, high: float = 0.95) -> tuple[float, Interval]:
    chance = rng.uniform(low, high)
    return chance, Rate.of((k, rng.random() < chance) for k in range(episodes)).interval


def rate_over_states(rng: np.random.Generator, states: int, alike: float) -> tuple[float, Interval]:
    """Five episodes per state; success rates of states differ (beta-binomial)."""
    chances = rng.beta(0.6 * (1 - alike) / alike, 0.4 * (1 - alike) / alike, states)
    return 0.6, Rate.of((k, rng.random() < chance) for k, chance in enumerate(chances) for _ in range(5)).interval


def difference(rng: np.random.Generator, states: int, each: int = 1) -> tuple[float, Interval]:
    """Two policies on the same states, which are harder or easier for both."""
    chances = rng.uniform(0.0, 0.6, states)
    wins = [
        (k, int(rng.random() < p + 0.2) - int(rng.random() < p)) for k, p in enumerate(chances) for _ in range(each)
    ]
    return 0.2, rate_difference(wins)


def difference_near_one(rng: np.random.Generator, pairs: int) -> tuple[float, Interval]:
    first, second = rng.uniform(0.9, 1.0, 2)
    wins = [(k, int(rng.random() < second) - int(rng.random() < first)) for k in range(pairs)]
    return second - first, rate_difference(wins)


def mean(rng: np.random.Generator, states: int) -> tuple[float, Interval]:
    """Four episodes per state."""
    returns = rng.normal(size=(states, 1)) + rng.normal(size=(states, 4))
    return 0.0, Mean.of((k, value) for k, row in enumerate(returns) for value in row).interval


def over_seeds(rng: np.random.Generator, seeds: int) -> tuple[float, Interval]:
    """Success rates of 100 episodes in runs that differ by ten points."""
    chances = rng.normal(0.6, 0.1, seeds).clip(0, 1)
    _, low, high = mean_interval((rng.binomial(100, chances) / 100).tolist())
    return 0.6, (low, high)


def over_seeds_near_one(rng: np.random.Generator, seeds: int) -> tuple[float, Interval]:
    """Success rates from 90 to 100 % of 100 episodes, often equal in all runs."""
    chance = rng.uniform(0.9, 1.0)
    rates = [Rate(int(successes), 100) for successes in rng.binomial(100, chance, seeds)]
    _, low, high = mean_interval([rate.value for rate in rates], [rate.interval for rate in rates])
    return chance, (low, high)


def middle_of_runs(rng: np.random.Generator, runs: int) -> tuple[float, Interval]:
    scores = rng.normal(size=(runs, 5)) * 0.1 + np.arange(5) * 0.05
    return MIDDLE, stratified_bootstrap([scores], interquartile_mean)


def improvement(rng: np.random.Generator, runs: int) -> tuple[float, Interval]:
    """A shift by 0.7 standard deviations: Phi(0.7 / sqrt(2))."""
    a, b = rng.normal(size=(runs, 2)), rng.normal(0.7, 1, size=(runs, 2))
    return 0.68969, stratified_bootstrap([a, b], probability_of_improvement)


KINDS: dict[str, tuple[Draw, int]] = {
    "rate, 10 episodes": (lambda rng: rate(rng, 10), 3000),
    "rate, 50 episodes": (lambda rng: rate(rng, 50), 3000),
    "rate, 50 episodes, above 90 %": (lambda rng: rate(rng, 50, 0.9, 1.0), 3000),
    "rate, 10 states": (lambda rng: rate_over_states(rng, 10, 0.2), 3000),
    "rate, 30 states": (lambda rng: rate_over_states(rng, 30, 0.2), 2000),
    "difference of rates, 20 pairs": (lambda rng: difference(rng, 20), 3000),
    "difference of rates, 100 pairs": (lambda rng: difference(rng, 100), 2000),
    "difference of rates, 100 pairs, above 90 %": (lambda rng: difference_near_one(rng, 100), 2000),
    "difference of rates, 20 states": (lambda rng: difference(rng, 20, 5), 2000),
    "mean, 5 states": (lambda rng: mean(rng, 5), 3000),
    "mean, 30 states": (lambda rng: mean(rng, 30), 1500),
    "seeds, 3": (lambda rng: over_seeds(rng, 3), 3000),
    "seeds, 3, rates above 90 %": (lambda rng: over_seeds_near_one(rng, 3), 3000),
    "seeds, 10, rates above 90 %": (lambda rng: over_seeds_near_one(rng, 10), 3000),
    "seeds, 10": (lambda rng: over_seeds(rng, 10), 3000),
    "interquartile mean, 10 runs": (lambda rng: middle_of_runs(rng, MIN_BOOTSTRAP_RUNS), 400),
    "interquartile mean, 20 runs": (lambda rng: middle_of_runs(rng, 20), 400),
    "improvement, 10 runs": (lambda rng: improvement(rng, MIN_BOOTSTRAP_RUNS), 250),
}


def covered(kind: str, times: int) -> float:
    draw, rng = KINDS[kind][0], np.random.default_rng(0)
    inside = 0
    for _ in range(times):
        true, (low, high) = draw(rng)
        inside += low <= true <= high
    return inside / times


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_have_nominal_coverage(kind: str) -> None:
    assert 0.92 <= covered(kind, KINDS[kind][1]) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_have_nominal_coverage_in_many_samples(kind: str) -> None:
    share = covered(kind, 5 * KINDS[kind][1])
    assert 0.92 <= share <= 0.98
    assert f"| {kind} | {100 * share:.1f} |" in STATISTICS.read_text(encoding="utf-8")
