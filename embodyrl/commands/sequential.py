"""Sequential test of two policies on the same episodes, which stops once the difference is significant.

The test is anytime-valid: the probability that the test ever reports a difference between equal policies is at most
5 %, for any number of interim tests.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from embodyrl.commands.eval_result import EvalResult
from embodyrl.commands.evaluate import evaluate
from embodyrl.config.compose import dir_flags, format_override
from embodyrl.config.settings import to_builtin
from embodyrl.errors import ConfigError, clean_text, mask_json
from embodyrl.files import json_text
from embodyrl.monitor.history import EPISODES_FILE, EpisodeRow, read_episodes
from embodyrl.monitor.intervals import Rate
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_with_ckpt
from embodyrl.plan.episodes import EpisodeList, eval_episodes
from embodyrl.plan.keys import state_keys
from embodyrl.plan.schema import Config
from embodyrl.reports.history import SUCCESS_KEYS, describe_differences
from embodyrl.reports.paired import SIGNIFICANT

_RESERVED_KEYS = ("ckpt", "runner.experiment_name", "runner.on_existing", "runner.resume_dir")
"""Keys that the test sets for each of the two evaluations."""
_FIRST_TEST_PAIRS, _GROWTH = 20, 1.5
"""Number of pairs at the first interim test, and the factor by which this number grows from test to test."""


def log_e_value(wins: int, losses: int) -> float:
    """Return the logarithm of the e-value of the null hypothesis that both policies win equally often.

    The second policy wins w of n pairs with different outcomes. The likelihood ratio between a win rate with a uniform
    prior and a win rate of 1/2 is E = 2^n w! (n - w)! / (n + 1)! (Robbins 1970). E is a martingale under the null
    hypothesis, so P(E ever reaches 1 / alpha) <= alpha (Ville 1939; Grünwald, de Heide and Koolen, arXiv 1906.07801).

    >>> round(math.exp(log_e_value(9, 0)), 2), log_e_value(0, 0)
    (51.2, 0.0)
    """
    n = wins + losses
    return n * math.log(2) + math.lgamma(wins + 1) + math.lgamma(losses + 1) - math.lgamma(n + 2)


@dataclass(frozen=True, slots=True)
class SequentialResult:
    """Result of the sequential test so far; `only_first` counts the pairs in which only the first policy succeeded."""

    pairs: int
    """Number of pairs tested until the decision; all pairs if there is no decision."""
    only_first: int
    only_second: int
    p_value: float
    """Anytime-valid p-value: the inverse of the largest e-value."""

    @property
    def is_decided(self) -> bool:
        """True if the policies differ at the 5 % level."""
        return self.p_value <= SIGNIFICANT


def run_test(differences: Iterable[int]) -> SequentialResult:
    """Test pairs in order until the policies differ significantly.

    Args:
        differences: success of the second minus success of the first policy (-1, 0 or 1), one pair per initial state.

    >>> run_test([0, 1] * 20)
    SequentialResult(pairs=16, only_first=0, only_second=8, p_value=0.03515625)
    """
    wins, pairs, largest = {1: 0, -1: 0, 0: 0}, 0, 0.0
    for difference in differences:
        pairs += 1
        wins[difference] += 1
        largest = max(largest, log_e_value(wins[1], wins[-1]))
        if math.exp(-largest) <= SIGNIFICANT:
            break
    return SequentialResult(pairs, wins[-1], wins[1], round(math.exp(-largest), 10))


def compare_policies(runs: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[Path], as_json: bool) -> int:
    """Run `embodyrl eval --until-significant RUN_A RUN_B`; return the exit code.

    Raises:
        ConfigError: the runs have different initial states, horizons or success keys, the initial states are too
            few or occur several times, or an override sets the weights or the run folder.
    """
    if reserved := [
        override for override in overrides if override.partition("=")[0] in _RESERVED_KEYS or "=" not in override
    ]:
        raise ConfigError(
            f"--until-significant sets the weights and the run folders itself; remove {' '.join(reserved)}."
        )
    evaluations = [_PolicyEvaluation(run, overrides, config_dirs) for run in runs]
    first, second = (evaluation.compose() for evaluation in evaluations)
    if differences := describe_differences(to_builtin(first), to_builtin(second), {*state_keys(), *SUCCESS_KEYS}):
        raise ConfigError(
            f"--until-significant: the runs have different initial states, horizons or success keys ({differences}). "
            "Set these keys to one value for both."
        )
    max_pairs = min(map(_count_max_pairs, (first, second)))
    print_line = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    print_line(f"at most {max_pairs} episodes of each policy; significance level 5 %")
    verdict = run_test([])
    for count in _test_sizes(max_pairs):
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            for evaluation in evaluations:
                evaluation.run_episodes(count)
        verdict = run_test(_compute_differences(*(evaluation.rows for evaluation in evaluations)))
        if verdict.is_decided:
            break
        print_line(f"{count} of {max_pairs} episodes: no decision, p = {verdict.p_value:.3g}")
    lines = [*(evaluation.line() for evaluation in evaluations), _format_result(verdict, runs, max_pairs)]
    values = {"pairs": verdict.pairs, "only_first": verdict.only_first, "only_second": verdict.only_second}
    result = values | {
        "p": verdict.p_value,
        "most": max_pairs,
        "folders": [str(evaluation.folder) for evaluation in evaluations],
    }
    print(mask_json(json_text(result)) if as_json else clean_text("\n".join(lines)), end="" if as_json else "\n")
    return 0


def _format_result(verdict: SequentialResult, runs: Sequence[str], max_pairs: int) -> str:
    counts = f"only {runs[0]} succeeds in {verdict.only_first}, only {runs[1]} in {verdict.only_second}"
    test = f"sequential test p = {verdict.p_value:.3g}"
    if not verdict.is_decided:
        return f"{verdict.pairs} episodes: {counts}; {test}: no significant difference"
    better = runs[verdict.only_second > verdict.only_first]
    return f"{verdict.pairs} of at most {max_pairs} episodes: {counts}; {test}: {better} succeeds more often"


def _test_sizes(max_pairs: int) -> Iterator[int]:
    count = float(_FIRST_TEST_PAIRS)
    while count < max_pairs:
        yield int(count)
        count *= _GROWTH
    yield max_pairs


def _compute_min_pairs() -> int:
    """Return the minimum number of pairs for a decision, which suffices if one policy wins all pairs."""
    return next(wins for wins in itertools.count() if math.exp(-log_e_value(wins, 0)) <= SIGNIFICANT)


def _count_max_pairs(cfg: Config) -> int:
    """Return the maximum number of episode pairs of the test.

    Raises:
        ConfigError: the initial states are too few for a decision, or one occurs several times.
    """
    run_plan = build_run_plan(cfg, training=False)
    plan = eval_episodes(cfg, run_plan.env, run_plan.policy)
    states = len({episode.reset_id for episode in plan.episodes})
    if states < (min_pairs := _compute_min_pairs()):
        raise ConfigError(
            f"--until-significant: {states} initial states are too few for a significant difference. At least "
            f"{min_pairs} are needed, if one policy wins in all of them. Raise eval.episodes, or evaluate more states "
            "(env.eval.state_ids)."
        )
    if states < plan.num_episodes:
        raise ConfigError(
            f"--until-significant: {plan.num_episodes} episodes have only {states} initial states, so pairs are not "
            f"independent. Set eval.samples=1 eval.episodes={states}, or evaluate more states (env.eval.state_ids)."
        )
    return count_planned_episodes(plan)


def count_planned_episodes(plan: EpisodeList) -> int:
    """Return the smallest `eval.episodes` that includes all episodes of `plan`: the highest episode id plus 1.

    A plan can skip episode ids, because repeated episodes are evaluated once.
    """
    return max(episode.episode_id for episode in plan.episodes) + 1


class _PolicyEvaluation:
    """Evaluation of one of the two policies under test; each interim test adds episodes."""

    def __init__(self, run: str, overrides: Sequence[str], config_dirs: Sequence[Path]) -> None:
        self.run = run
        self.rows: Sequence[EpisodeRow] = ()
        self.folder: Path | None = None
        self._overrides = [*overrides, format_override("ckpt", run)]
        self._config_dirs = config_dirs

    def compose(self, *extra: str) -> Config:
        """Return the config of the evaluation, composed with the additional overrides `extra`."""
        overrides = [*self._overrides, *extra]
        return load_with_ckpt("eval", overrides, config_dirs=self._config_dirs)

    def run_episodes(self, count: int) -> None:
        """Evaluate the policy until the first `count` episodes are finished."""
        extra, flags = (f"eval.episodes={count}",), dir_flags(self._config_dirs)
        result: EvalResult = evaluate(
            self.compose(*extra), overrides=[*self._overrides, *extra, *flags], resume=self.folder
        )
        self.folder = result.folder.parents[1]
        self.rows = read_episodes(result.folder / EPISODES_FILE)

    def line(self) -> str:
        """Return a line of text with the success rate of the policy."""
        rate = Rate(sum(bool(row.success_once) for row in self.rows), len(self.rows))
        return f"{self.run}: {rate}, {self.folder}"


def _compute_differences(first: Sequence[EpisodeRow], second: Sequence[EpisodeRow]) -> list[int]:
    """Return the success of the second policy minus the success of the first policy, for each episode.

    Raises:
        ConfigError: the environment does not report success.
    """
    if all(row.success_once is None for row in (*first, *second)):
        raise ConfigError(
            "--until-significant needs an environment that reports success; compare returns with `embodyrl report`."
        )
    first_successes = {(row.reset_id, row.seed): bool(row.success_once) for row in first}
    pairs = ((first_successes.get((row.reset_id, row.seed)), bool(row.success_once)) for row in second)
    return [second_success - first_success for first_success, second_success in pairs if first_success is not None]
