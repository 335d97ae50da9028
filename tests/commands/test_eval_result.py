"""Evaluation results per task, per suite and overall against values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_env import toy_spec

from embodyrl.commands.eval_result import EvalResult, compare_results, summarize, to_episode_row
from embodyrl.monitor.history import EpisodeRow
from embodyrl.scheduler.rollout import RolloutResult, RolloutStats
from embodyrl.types import BenchmarkSpec, EnvSpec, Episode, EpisodeSpec, RewardSpec


def row(
    number: int, task: int, state: int, *, won: bool | None, earned: float = 0.0, steps: int = 4, suite: str = ""
) -> EpisodeRow:
    return EpisodeRow(
        episode=number,
        task_id=task,
        task=f"task {task}",
        reset_id=state,
        seed=number,
        success_once=won,
        success_at_end=won,
        episode_return=earned,
        steps=steps,
        terminated=bool(won),
        truncated=not won,
        seconds=0.1,
        video=None,
        suite=suite,
    )


def table(rows: list[EpisodeRow], env: EnvSpec, **kept: object) -> EvalResult:
    collection = RolloutResult(stats=RolloutStats(env_steps=99, wall_s=3.0), **kept)  # type: ignore[arg-type]
    return summarize(rows, collection, env, Path("nowhere"))


ROWS = [
    row(0, 0, 0, won=True, earned=1.0, steps=2),
    row(1, 0, 0, won=True, earned=3.0, steps=4),
    row(2, 0, 1, won=False, earned=0.0, steps=8),
    row(3, 1, 4, won=False, earned=0.0, steps=8),
    row(4, 1, 5, won=True, earned=1.0, steps=3),
    row(5, 1, 5, won=False, earned=1.0, steps=5),
]


def test_dropped_episodes_are_counted_over_all_suites():
    """Fails if the episodes of all suites are compared with the number of episodes of the first suite."""
    spec = replace(toy_spec(2), benchmark=BenchmarkSpec(suites=("base", "swap")))
    rows = [row(number, number % 2, number, won=True, suite=spec.benchmark.suites[number % 2]) for number in range(6)]
    assert table(rows, spec, dropped=2).dropped_warning.startswith("INCOMPLETE: 2 of 8 episodes")


def test_effective_episodes_account_for_repeated_states():
    """Returns are clustered like successes; fails if episodes are counted separately when success is unknown."""
    rows = [row(k, 0, k % 3, won=None, earned=(5.0, 1.0, 3.0)[k % 3]) for k in range(12)]
    assert table(rows, toy_spec(1)).overall.effective_episodes == pytest.approx(3)
    mixed = [row(k, 0, k % 3, won=None, earned=float(k // 3)) for k in range(12)]
    assert table(mixed, toy_spec(1)).overall.effective_episodes == pytest.approx(12)


def test_per_task_and_overall_results_match_hand_computed_values():
    result = table(ROWS, toy_spec(2), dropped=2)
    first, second = result.tasks
    assert (first.episodes, first.states, first.solved, first.successes) == (3, 2, 1, 2)
    assert (second.episodes, second.states, second.solved, second.successes) == (3, 2, 1, 1)
    assert (first.success_once, first.mean_return, first.mean_steps) == pytest.approx((2 / 3, 4 / 3, 14 / 3))
    everything = result.overall
    assert (everything.episodes, everything.states, everything.solved, everything.successes) == (6, 4, 2, 3)
    assert (everything.success_once, everything.mean_return, everything.mean_steps) == pytest.approx((0.5, 1.0, 5.0))
    low, high = everything.score.interval
    assert low < 0.5 < high
    assert (everything.low, everything.high) == (low, high)
    assert (result.dropped, result.exit_code, result.env_steps, result.wall_s) == (2, 4, 99, 3.0)
    assert result.dropped_warning.startswith("INCOMPLETE: 2 of 8 episodes")
    metrics = result.metrics()
    assert metrics.pop("eval/effective_episodes") < 6
    assert metrics == pytest.approx(
        {
            "eval/success_once": 0.5,
            "eval/success_at_end": 0.5,
            "eval/return": 1.0,
            "eval/episode_len": 5.0,
            "eval/episode_len_min": 2.0,
            "eval/episode_len_max": 8.0,
            "eval/episodes": 6,
            "eval/dropped_episodes": 2,
            "eval/solved_at_reset": 0,
            "eval/pass_at_n": 0.5,
            "eval/task_0/success_once": 2 / 3,
            "eval/task_1/success_once": 1 / 3,
        }
    )


def test_majority_vote_uses_the_most_frequent_answer():
    """Two of three replies agree on a wrong answer; two of four agree on a right answer, and the others differ."""
    said = [(0, "so 7", False), (0, "\\boxed{8}", True), (0, "it is 7", False)]
    said += [(1, "a", False), (1, " 12 ", True), (1, "x = 12", True), (1, "13", False)]
    rows = [
        replace(row(i, 0, state, won=won, earned=0.0, steps=1), conversation=(("user", "?"), ("assistant", reply)))
        for i, (state, reply, won) in enumerate(said)
    ]
    assert table(rows, toy_spec(2)).metrics()["eval/maj_at_n"] == 0.5


def votes(*said: tuple[str, bool], role: str = "assistant") -> float | None:
    rows = [
        replace(row(i, 0, 0, won=won, earned=0.0, steps=1), conversation=(("user", "?"), (role, reply)))
        for i, (reply, won) in enumerate(said)
    ]
    return table(rows, toy_spec(2)).metrics().get("eval/maj_at_n")


def test_majority_vote_merges_equivalent_answers_only():
    letters = [("I think so. The answer is B", False), ("2 of 3 say (A). Answer: (A).", True), ("answer: A", True)]
    assert votes(*letters) == 1.0
    pairs = [("\\boxed{12}", False), ("\\boxed{(1,2)}", True), ("\\boxed{(1,2)}", True), ("\\boxed{12}", False)]
    assert votes(*pairs) == 0.0, "of equally frequent ones the first"
    assert votes(*pairs[1:]) == 1.0
    assert votes(("12", False), ("it is 1,000.", True), ("1000", True)) == 1.0
    assert votes(("Answer: A total of 12", True), ("Answer: A total of 13", False), ("13", False)) == 0.0


def test_majority_vote_is_undefined_for_games():
    assert votes(("15:", True), ("7:", False), ("7:", False), role="user") is None


def test_unreported_success_is_none_not_zero():
    result = table([replace(one, success_once=None, success_at_end=None) for one in ROWS], toy_spec(2))
    assert (result.overall.success_once, result.overall.successes, result.overall.solved) == (None, None, None)
    assert result.overall.score.value == pytest.approx(1.0)
    assert not [name for name in result.metrics() if "success" in name or "pass" in name]
    assert (result.exit_code, result.overall.states) == (0, 4)


def test_overall_results_cover_the_main_suite_only():
    env = replace(toy_spec(2), benchmark=BenchmarkSpec(suites=("own", "other")))
    rows = [replace(one, suite="own" if one.task_id == 0 else "other") for one in ROWS]
    result = table(rows, env)
    assert (result.overall.episodes, result.overall.success_once) == (3, pytest.approx(2 / 3))
    assert [(one.task, one.success_once) for one in result.suites] == [
        ("own", pytest.approx(2 / 3)),
        ("other", pytest.approx(1 / 3)),
    ]
    assert [(one.suite, one.number) for one in result.tasks] == [("own", 0), ("other", 0)]
    metrics = result.metrics()
    assert metrics["eval/success_once"] == pytest.approx(2 / 3)
    assert metrics["eval/other/success_once"] == pytest.approx(1 / 3)
    assert metrics["eval/other/return"] == pytest.approx(2 / 3)


def test_changes_are_computed_for_each_task():
    later = [replace(one, success_once=True) for one in ROWS]
    found = compare_results(table(ROWS, toy_spec(2)), table(later, toy_spec(2)))
    assert [(name, before.value, after.value) for name, before, after in found] == [
        ("go right", pytest.approx(2 / 3), 1.0),
        ("go left", pytest.approx(1 / 3), 1.0),
        ("all tasks", 0.5, 1.0),
    ]


def test_episode_row_contains_unscaled_rewards():
    column = np.array([[0.0], [4.0], [2.0]], np.float32)
    won = np.array([[False], [True], [False]])
    episode = Episode(
        spec=EpisodeSpec(episode_id=5, reset_id=9, task_id=1, group_id=0, member=0, seed=31, noise_seed=0),
        records=np.arange(3),
        reward=column,
        valid=np.ones_like(won),
        success=won,
        value=column,
        bootstrap_value=column[0],
        terminated=False,
        truncated=True,
        instruction="go left",
        duration_s=1.23456,
    )
    kept = to_episode_row(episode, replace(toy_spec(2), reward=RewardSpec(factor=2.0)))
    assert (kept.episode, kept.task_id, kept.task, kept.reset_id, kept.seed) == (5, 1, "go left", 9, 31)
    assert (kept.success_once, kept.success_at_end, kept.episode_return, kept.steps) == (True, False, 3.0, 3)
    assert (kept.terminated, kept.truncated, kept.seconds) == (False, True, 1.235)
    silent = replace(toy_spec(2), reward=RewardSpec(reports_success=False))
    unknown = to_episode_row(replace(episode, success=np.zeros_like(won)), silent)
    assert (unknown.success_once, unknown.success_at_end) == (None, None)


@pytest.mark.parametrize(("task", "reset_id", "suite", "state"), [(1, 5, "own", 5), (2, 9, "other", 1)])
def test_states_are_numbered_within_each_suite(task, reset_id, suite, state):
    """Numbers within a suite let runs with other suites be paired; reset ids count through all suites."""
    env = replace(
        toy_spec(3),
        tasks=("a", "b", "c", "d"),
        states_per_task=(4,) * 4,
        benchmark=BenchmarkSpec(suites=("own",) * 2 + ("other",) * 2),
    )
    column = np.zeros((1, 1), np.float32)
    episode = Episode(
        spec=EpisodeSpec(episode_id=0, reset_id=reset_id, task_id=task, group_id=0, member=0, seed=0, noise_seed=0),
        records=np.arange(1),
        reward=column,
        valid=column == 0,
        success=column > 0,
        value=column,
        bootstrap_value=column[0],
        terminated=False,
        truncated=True,
    )
    kept = to_episode_row(episode, env)
    assert (kept.reset_id, kept.suite, kept.state) == (reset_id, suite, state)


def test_success_rates_are_compared_only_with_success_rates():
    """Fails if the return of one evaluation is subtracted from the success rate of the other."""
    silent = [row(k, 0, k, won=None, earned=-38.0) for k in range(4)]
    reporting = [row(0, 0, 0, won=True), *silent[1:]]
    ((_, first, last),) = compare_results(table(silent, toy_spec()), table(reporting, toy_spec()))
    assert (first.change(last), last.change(first)) == ("+25.0", "-25.0")
    ((_, first, last),) = compare_results(table(silent, toy_spec()), table(silent, toy_spec()))
    assert (str(first.value), first.change(last)) == ("-38.0", "+0")
