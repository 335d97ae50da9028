"""Aggregate metrics over runs that differ only in their seed, as defined by rliable (arXiv 2108.13264).

A matrix of scores has a row for each run and a column for each task. Intervals are 95 %: Student's t over runs and,
from ten runs on, a stratified bootstrap that samples runs with replacement within each task. With three runs, the
coverage of such a bootstrap is only 73 to 83 %.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.config.compose import flatten
from embodyrl.monitor.intervals import Rate, student_t
from embodyrl.reports.history import History
from embodyrl.reports.paired import SIGNIFICANT

Matrix = npt.NDArray[np.float64]
"""Array [runs, tasks] of scores."""

_RESAMPLES = 2000
_SEED = 20211015
"""Random seed of the bootstrap and the permutation test, for reproducible intervals."""
MIN_BOOTSTRAP_RUNS = 10
"""Minimum number of runs for a bootstrap interval."""
_RUN_KEYS = ("seed", "runner.experiment_name", "runner.output_dir", "runner.on_existing", "runner.resume_dir", "trust")
"""Config keys that may differ between runs of one experiment."""


def interquartile_mean(scores: npt.ArrayLike) -> Any:
    """Return the mean of scores [..., runs, tasks] without the lowest and the highest quarter.

    >>> float(interquartile_mean([[0.0, 1.0], [2.0, 9.0]]))
    1.5
    """
    values = np.asarray(scores, np.float64)
    ordered = np.sort(values.reshape(*values.shape[:-2], -1), axis=-1)
    cut = int(0.25 * ordered.shape[-1])
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def probability_of_improvement(first: npt.ArrayLike, second: npt.ArrayLike) -> Any:
    """Return the mean over tasks of P(a run of the second group scores higher than a run of the first group).

    Scores are [..., runs, tasks]; ties count half (Mann and Whitney).

    >>> float(probability_of_improvement([[0.0], [1.0]], [[1.0], [2.0]]))
    0.875
    """
    a, b = (np.asarray(scores, np.float64) for scores in (first, second))
    a, b = a[..., :, None, :], b[..., None, :, :]
    return ((b > a) + 0.5 * (b == a)).mean(axis=(-3, -2, -1))


def permutation_test(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Return the two-sided p-value of the probability of improvement under random assignment of the runs.

    The test uses all permutations for few runs, else `_RESAMPLES` random permutations. For two groups of three runs,
    p is at least 0.1.

    >>> permutation_test([[0.0], [0.1], [0.2]], [[1.0], [1.1], [1.2]])
    0.1
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    runs, count = np.concatenate([a, b]), len(a) + len(b)
    if math.comb(count, len(a)) <= _RESAMPLES:
        assignments = [[*assignment] for assignment in itertools.combinations(range(count), len(a))]
    else:
        rng = np.random.default_rng(_SEED)
        assignments = [[*range(len(a))], *(rng.permutation(count)[: len(a)].tolist() for _ in range(_RESAMPLES))]
    gaps = [
        abs(probability_of_improvement(runs[assignment], np.delete(runs, assignment, axis=0)) - 0.5)
        for assignment in assignments
    ]
    return float(np.mean(np.array(gaps) >= abs(probability_of_improvement(a, b) - 0.5) - 1e-9))


def stratified_bootstrap(matrices: Sequence[Matrix], statistic: Callable[..., Any]) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of a statistic of one or more matrices of scores.

    The interval is the expanded percentile interval (Hesterberg 2015, section 5.3). Plain percentile intervals are too
    narrow for few runs. The percentiles are therefore expanded to the normal probability of sqrt(n / (n - 1)) times
    Student's t with n - 1 degrees of freedom. n is the number of runs, minus 1 for each matrix after the first.

    Args:
        matrices: scores [runs, tasks].
        statistic: function of matrices [samples, runs, tasks] that returns [samples].
    """
    rng, count = np.random.default_rng(_SEED), sum(map(len, matrices)) - len(matrices) + 1
    resampled = [
        np.take_along_axis(matrix[None], rng.integers(0, len(matrix), (_RESAMPLES, *matrix.shape)), axis=1)
        for matrix in matrices
    ]
    outside = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_t(count - 1))
    low, high = np.quantile(statistic(*resampled), (outside, 1 - outside))
    return float(low), float(high)


def mean_interval(values: Sequence[float], intervals: Sequence[tuple[float, float]] = ()) -> tuple[float, float, float]:
    """Return the mean over runs and its 95 % interval (Student's t). The interval of a single run is infinite.

    If all values are equal, the interval is the union of `intervals`, the intervals of the runs. Student's interval
    would have zero width and a coverage far below 95 %: 75 % for 3 runs of 100 episodes at a true success rate of 99.5
    %.

    >>> mean_interval([1.0, 1.0, 1.0], [(0.963, 1.0)] * 3)
    (1.0, 0.963, 1.0)
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, -math.inf, math.inf
    if intervals and min(values) == max(values):
        return mean, min(low for low, _ in intervals), max(high for _, high in intervals)
    variance = math.fsum((v - mean) ** 2 for v in values) / (count - 1)
    half_width = student_t(count - 1) * math.sqrt(variance / count)
    return mean, mean - half_width, mean + half_width


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs of one experiment, which differ only in their seed."""

    runs: tuple[History, ...]

    @property
    def name(self) -> str:
        """Name of the single run, or the first run's name without its sweep number, followed by the number of seeds."""
        name = self.runs[0].name
        return name if len(self.runs) == 1 else f"{name.removesuffix('-0')} ({len(self.runs)} seeds)"

    @property
    def tasks(self) -> list[str]:
        """Tasks in the last evaluation of every run."""
        tasks_per_run = [run.evaluations[-1].tasks for run in self.runs]
        return [task for task in tasks_per_run[0] if all(task in others for others in tasks_per_run)]

    @property
    def reports_success(self) -> bool:
        """True if at least one run reports success; some environments report success only if an episode succeeds."""
        return any(isinstance(run.evaluations[-1].score(), Rate) for run in self.runs)

    def matrix(self, tasks: Sequence[str], *, reports_success: bool) -> Matrix:
        """Return the scores [runs, tasks] of the last evaluations, as success rates or returns."""
        results = [run.evaluations[-1] for run in self.runs]
        return np.array([[result.score(task, known=reports_success).value for task in tasks] for result in results])

    def summary(self) -> list[str]:
        """Return the results over all seeds as lines of text; empty for a single run or without common tasks."""
        if len(self.runs) < 2 or not all(run.evaluations for run in self.runs) or not (tasks := self.tasks):
            return []
        rate = self.reports_success
        matrix = self.matrix(tasks, reports_success=rate)
        seeds = ", ".join(str(run.config.get("seed")) for run in self.runs)
        scores = [run.evaluations[-1].score(known=rate) for run in self.runs]
        overall = [score.value for score in scores]
        mean, low, high = mean_interval(overall, [score.interval for score in scores])
        values_text = "; ".join(_format_value(value, rate) for value in overall)
        lines = [
            f"{self.name}: mean over seeds {seeds}: {_format_value(mean, rate)} "
            f"{_format_interval((low, high), rate)} ({values_text})"
        ]
        if len(self.runs) >= MIN_BOOTSTRAP_RUNS:
            mean_score, bounds = interquartile_mean(matrix), stratified_bootstrap([matrix], interquartile_mean)
            mean_text = f"{_format_value(mean_score, rate)} {_format_interval(bounds, rate)}"
            lines.append(f"  interquartile mean over {matrix.size} runs x tasks: {mean_text}")
        return lines

    def curve(self, metric: str, limits: tuple[float, float] | None = None) -> list[tuple[int, float, float, float]]:
        """Return (step, mean over runs, 95 % interval) at steps at which all runs have the metric."""
        series = [dict(run.series(metric)) for run in self.runs]
        points = []
        for step in sorted(set.intersection(*(set(values) for values in series))):
            mean, low, high = mean_interval([values[step] for values in series])
            bounds = limits or (-math.inf, math.inf)
            points.append((step, mean, max(low, bounds[0]), min(high, bounds[1])))
        return points


def group_by_seed(histories: Sequence[History]) -> list[SeedGroup]:
    """Group runs whose configs differ only in seed and name; groups are in the order of their first run.

    Runs with equal seeds are not grouped, because they are not independent samples of seeds.
    """
    groups: dict[str, list[History]] = {}
    for history in histories:
        groups.setdefault(_get_experiment_key(history.config), []).append(history)
    result: list[SeedGroup] = []
    for runs in groups.values():
        has_distinct_seeds = len({str(run.config.get("seed")) for run in runs}) == len(runs)
        result += [SeedGroup(tuple(runs))] if has_distinct_seeds else [SeedGroup((run,)) for run in runs]
    return result


def compare_groups(first: SeedGroup, second: SeedGroup) -> str | None:
    """Return the probability that the second group improves on the first, as text; None without common tasks."""
    if min(len(first.runs), len(second.runs)) < 2 or not all(r.evaluations for r in (*first.runs, *second.runs)):
        return None
    # Match tasks by name: equal numbers of different tasks must not be compared.
    others = set(second.tasks)
    tasks = [task for task in first.tasks if task in others]
    if not tasks:
        return None
    reports_success = first.reports_success or second.reports_success
    a, b = first.matrix(tasks, reports_success=reports_success), second.matrix(tasks, reports_success=reports_success)
    value, bounds = f"{probability_of_improvement(a, b):.2f}", ""
    if min(len(a), len(b)) >= MIN_BOOTSTRAP_RUNS:
        bounds = " [{:.2f}, {:.2f}]".format(*stratified_bootstrap([a, b], probability_of_improvement))
    # Use a permutation test: with many tasks and few runs, the interval is too narrow.
    p_value = permutation_test(a, b)
    conclusion = "significant" if p_value < SIGNIFICANT else "not significant"
    return (
        f"probability that {second.name} improves on {first.name}: {value}{bounds} over "
        f"{a.shape[1]} tasks (permutation test p = {p_value:.2g}: {conclusion})"
    )


def _get_experiment_key(config: Mapping[str, object]) -> str:
    values = {name: value for name, value in flatten(config).items() if name not in _RUN_KEYS}
    return json.dumps(values, sort_keys=True, default=str)


def _format_value(value: float, rate: bool) -> str:
    return f"{100 * value:.1f} %" if rate else f"{value:.4g}"


def _format_interval(interval: tuple[float, float], rate: bool) -> str:
    low, high = (min(max(v, 0.0), 1.0) for v in interval) if rate else interval
    return f"[{100 * low:.1f}, {100 * high:.1f}]" if rate else f"[{low:.4g}, {high:.4g}]"
