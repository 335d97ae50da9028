"""Runs of several seeds as one result, against independent computations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from run_files import TASKS, write_evaluation, write_run

from embodyrl.reports.history import Evaluation, History, read_history
from embodyrl.reports.page import write_report
from embodyrl.reports.seeds import (
    SeedGroup,
    compare_groups,
    group_by_seed,
    interquartile_mean,
    mean_interval,
    permutation_test,
    probability_of_improvement,
    stratified_bootstrap,
)

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("shape", [(3, 10), (5, 26), (4, 1), (2, 3)])
def test_interquartile_mean_matches_trimmed_mean(shape: tuple[int, int]) -> None:
    scores = np.random.default_rng(3).normal(size=shape)
    assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None), abs=1e-12)


def test_probability_of_improvement_is_the_fraction_of_won_pairs() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 4, (3, 6)) / 4, rng.integers(0, 4, (5, 6)) / 4
    by_hand = [
        np.mean([1.0 if y > x else 0.5 if y == x else 0.0 for x, y in product(a[:, t], b[:, t])]) for t in range(6)
    ]
    assert probability_of_improvement(a, b) == pytest.approx(np.mean(by_hand), abs=1e-12)
    whitney = [stats.mannwhitneyu(b[:, t], a[:, t], method="asymptotic").statistic / 15 for t in range(6)]
    assert probability_of_improvement(a, b) == pytest.approx(np.mean(whitney), abs=1e-12)
    assert probability_of_improvement(a, a) == 0.5


def mean_of_all(drawn: np.ndarray) -> np.ndarray:
    return drawn.mean(axis=(-2, -1))


def test_bootstrap_resamples_runs_within_each_task() -> None:
    """Independent bootstrap in which every task resamples its own runs."""
    matrix = np.random.default_rng(7).normal(size=(5, 8)) + np.arange(8) * 10
    low, high = stratified_bootstrap([matrix], interquartile_mean)
    rng, found = np.random.default_rng(11), []
    for _ in range(1500):
        drawn = np.stack([rng.choice(matrix[:, t], 5) for t in range(8)], axis=1)
        found.append(stats.trim_mean(drawn, 0.25, axis=None))
    outside = stats.norm.cdf(-np.sqrt(5 / 4) * stats.t.ppf(0.975, 4))
    assert (low, high) == pytest.approx(tuple(np.quantile(found, (outside, 1 - outside))), abs=0.15)
    assert high - low < 3.0, "tasks differ by ten, which is no uncertainty"
    assert stratified_bootstrap([matrix], interquartile_mean) == (low, high)
    opposed = np.stack([np.arange(5.0), -np.arange(5.0)], axis=1)
    low, high = stratified_bootstrap([opposed], mean_of_all)
    assert low < -0.3 < 0.3 < high, "each task draws runs of its own; of the same ones the mean is always 0"


@pytest.mark.parametrize("sizes", [(5,), (4, 6), (10, 3)])
def test_bootstrap_interval_has_the_degrees_of_freedom_of_its_groups(sizes: tuple[int, ...]) -> None:
    """One group of n runs: n - 1; two groups: those of both together, as in a t test."""
    rng, drawn = np.random.default_rng(2), []

    def statistic(*samples: np.ndarray) -> np.ndarray:
        drawn.append(sum((i + 1) * mean_of_all(one) for i, one in enumerate(samples)))
        return drawn[0]

    freedom = sum(size - 1 for size in sizes)
    outside = stats.norm.cdf(-np.sqrt((freedom + 1) / freedom) * stats.t.ppf(0.975, freedom))
    found = stratified_bootstrap([rng.normal(size=(size, 2)) for size in sizes], statistic)
    assert found == pytest.approx(tuple(np.quantile(drawn[0], (outside, 1 - outside))), rel=3e-3)


def test_mean_interval_matches_students_t() -> None:
    mean, low, high = mean_interval([0.80, 0.90, 0.85])
    wanted = stats.t.interval(0.95, 2, loc=0.85, scale=stats.sem([0.80, 0.90, 0.85]))
    assert (mean, low, high) == pytest.approx((0.85, *wanted), rel=1e-3)
    assert mean_interval([0.5])[1:] == (-np.inf, np.inf)


def runs_of(tmp_path: Path, name: str, *overrides: str, seeds: int = 3) -> list[Path]:
    return [write_run(tmp_path / f"{name}-{seed}", f"seed={seed}", *overrides) for seed in range(seeds)]


def test_runs_that_differ_only_in_seed_are_grouped(tmp_path: Path) -> None:
    mine, other = runs_of(tmp_path, "mine"), runs_of(tmp_path, "other", "actor.optim.lr=1e-5")
    groups = group_by_seed([read_history(run) for run in (mine[0], other[0], mine[1], other[1], mine[2], other[2])])
    assert [group.name for group in groups] == ["mine (3 seeds)", "other (3 seeds)"]
    said = groups[0].summary()
    assert said[0].startswith("mine (3 seeds): mean over seeds 0, 1, 2: 66.7 % [30.0, 90.3] (66.7 %; 66.7 %; 66.7 %)")
    assert len(said) == 1, "three runs have no bootstrap interval"
    chance = compare_groups(*groups)
    assert chance is not None
    assert "0.50 over 2 tasks (permutation test p = 1: not significant)" in chance
    lines = write_report([*mine, *other], tmp_path / "page.html")
    assert said[0] in lines
    assert chance in lines
    page = (tmp_path / "page.html").read_text()
    assert "mine (3 seeds)" in page
    assert page.count('class="band c1"') > 0
    curve = groups[0].curve("train/success_once", (0.0, 1.0))
    assert curve[0] == (1, 0.25, 0.25, 0.25)


def scored(tmp_path: Path, name: str, *successes: Sequence[bool | None], tasks: tuple[str, str] = TASKS) -> SeedGroup:
    """Return runs of two tasks with these outcomes in their last evaluation."""
    runs = []
    for seed, outcomes in enumerate(successes):
        run = write_run(tmp_path / f"{name}-{seed}", f"seed={seed}", f"actor.optim.lr={len(name)}e-5")
        write_evaluation(run, 9, outcomes, tasks=tasks)
        runs.append(read_history(run))
    return SeedGroup(tuple(runs))


def test_improvement_requires_a_significant_permutation_test(tmp_path: Path) -> None:
    """The verdict is that of the permutation test; the score of a run is its last evaluation."""
    first = scored(tmp_path, "a", [True] * 2, [False] * 2, [True] * 2)
    mixed, better = scored(tmp_path, "bb", *[[True] * 2] * 3), scored(tmp_path, "ccc", *[[True] * 2] * 3)
    assert "0.67 over 2 tasks (permutation test p = 1: not significant" in str(compare_groups(first, mixed))
    worst = scored(tmp_path, "dddd", *[[False] * 2] * 3)
    # Every bootstrap draw says 1, and yet one in ten ways to deal six runs to two sides separates them as well.
    assert "1.00 over 2 tasks (permutation test p = 0.1: not significant" in str(compare_groups(worst, better))
    many = scored(tmp_path, "eeeee", *[[False] * 2] * 4), scored(tmp_path, "ffffff", *[[True] * 2] * 4)
    assert "1.00 over 2 tasks (permutation test p = 0.029: significant" in str(compare_groups(*many))
    assert "66.7 % [0.0, 100.0] (100.0 %; 0.0 %; 100.0 %)" in first.summary()[0]


@pytest.mark.parametrize("sizes", [(3, 3), (2, 5), (4, 4)])
def test_permutation_test_of_one_task_matches_mann_whitney(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        a, b = rng.normal(size=(sizes[0], 1)), rng.normal(0.7, size=(sizes[1], 1))
        exact = stats.mannwhitneyu(a[:, 0], b[:, 0], method="exact").pvalue
        assert permutation_test(a, b) == pytest.approx(exact, abs=1e-12)
    far = permutation_test(np.zeros((9, 2)), np.ones((9, 2)))
    assert 0 < far < 0.01, "of more runs than can be dealt in every way"


def test_seed_without_success_counts_as_success_rate_zero(tmp_path: Path) -> None:
    """Fails if the return of one run is averaged with the success rates of others."""
    silent = [None] * 4
    group = scored(tmp_path, "a", silent, [True, None, None, True], [None, True, None, None])
    assert "(0.0 %; 50.0 %; 25.0 %)" in group.summary()[0]
    never = SeedGroup(tuple(replace(r, evaluations=(silent_end(r),)) for r in group.runs))
    assert "mean over seeds 0, 1, 2: 9 " in never.summary()[0], "of no run anything is known"
    mixed = SeedGroup((never.runs[0], *group.runs[1:]))
    assert "(0.0 %; 50.0 %; 25.0 %)" in mixed.summary()[0]
    # By success: ((1 + 2 / 2) / 3 + (2 + 1 / 2) / 3) / 2, although the returns of `never` are higher.
    assert ": 0.75 over 2 tasks" in str(compare_groups(never, mixed)), "only the second group ever succeeds"
    assert ": 0.25 over 2 tasks" in str(compare_groups(mixed, never))


def silent_end(run: History) -> Evaluation:
    end = run.evaluations[-1]
    said = (replace(e, success_once=None, success_at_end=None, episode_return=9.0) for e in end.episodes)
    return replace(end, episodes=tuple(said))


def test_improvement_compares_tasks_by_name(tmp_path: Path) -> None:
    """Fails if tasks are compared by position instead of name."""
    first = scored(tmp_path, "a", *[[True, False]] * 2)
    turned = scored(tmp_path, "bb", *[[False, True]] * 2, tasks=TASKS[::-1])
    assert "0.50 over 2 tasks" in str(compare_groups(first, turned))
    assert compare_groups(first, scored(tmp_path, "ccc", *[[True, True]] * 2, tasks=("x", "y"))) is None
    half = scored(tmp_path, "dddd", *[[True, True]] * 2, tasks=("x", TASKS[1]))
    assert "1.00 over 1 tasks" in str(compare_groups(first, half))


def test_bootstrap_intervals_have_95_percent_level() -> None:
    """With many runs, the interval of a mean is that of the normal distribution."""
    scores = np.random.default_rng(2).normal(size=(300, 1))
    low, high = stratified_bootstrap([scores], mean_of_all)
    assert (high - low) / 2 == pytest.approx(1.96 * scores.std() / 300**0.5, rel=0.08)


def test_ten_runs_have_bootstrap_intervals(tmp_path: Path) -> None:
    group = scored(tmp_path, "a", *[[k % 2 == 0, True] for k in range(10)])
    middle = group.summary()[1]
    assert middle.startswith("  interquartile mean over 20 runs x tasks: 100.0 % [60.0, 100.0]"), middle
    assert "0.50 [0." in str(compare_groups(group, scored(tmp_path, "bb", *[[k % 2 == 0, True] for k in range(10)])))


def test_runs_with_equal_seeds_are_not_grouped(tmp_path: Path) -> None:
    runs = [read_history(write_run(tmp_path / name, "seed=3")) for name in ("before", "after")]
    assert [group.name for group in group_by_seed(runs)] == ["before", "after"]
    assert compare_groups(*group_by_seed(runs)) is None


def test_single_run_has_no_group_summary(tmp_path: Path) -> None:
    (group,) = group_by_seed([read_history(write_run(tmp_path / "alone"))])
    assert (group.name, group.summary()) == ("alone", [])


def test_group_contains_tasks_common_to_all_runs(tmp_path: Path) -> None:
    """A task missing in one run would count as never solved."""
    first = scored(tmp_path, "a", [True, True])
    second = scored(tmp_path, "bb", [True, True], tasks=(TASKS[1], "x"))
    group = SeedGroup((*first.runs, *second.runs))
    assert group.tasks == [TASKS[1]]
    assert group.matrix(group.tasks, reports_success=True).tolist() == [[1.0], [1.0]]


def test_group_with_a_repeated_seed_is_split(tmp_path: Path) -> None:
    runs = [read_history(write_run(tmp_path / f"r{k}", f"seed={seed}")) for k, seed in enumerate((3, 3, 4))]
    assert [len(group.runs) for group in group_by_seed(runs)] == [1, 1, 1]


def test_return_intervals_are_not_limited_to_zero_to_one(tmp_path: Path) -> None:
    """Four of six episodes have return 90, the others 10."""
    runs = runs_of(tmp_path, "mine", seeds=2)
    for path in (file for run in runs for file in run.glob("eval/*/episodes.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        unknown = {"success_once": None, "success_at_end": None}
        told = [row | unknown | {"return": 10.0 + 80.0 * row["return"]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in told))
    for run in runs:  # an environment that ever speaks of success has rates
        (run / "metrics.jsonl").unlink()
    (group,) = group_by_seed([read_history(run) for run in runs])
    assert "63.33 [20.03, 106.6] (63.33; 63.33)" in group.summary()[0]
