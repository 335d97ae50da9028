"""Paired comparisons against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from embodyrl.monitor.history import EpisodeRow
from embodyrl.monitor.intervals import Rate
from embodyrl.plan.keys import state_keys
from embodyrl.reports.paired import compare_episodes, compare_suites, mcnemar, rate_difference


def row(
    state: int, value: float, *, known: bool = True, suite: str = "", task_id: int = 0, late: bool = True
) -> EpisodeRow:
    """Return an episode with return `value`; if success is known, positive returns are successes."""
    return EpisodeRow(
        episode=state,
        task_id=task_id,
        task="t",
        reset_id=state,
        seed=1,
        success_once=value > 0 if known else None,
        success_at_end=value > 0 and late if known else None,
        episode_return=value,
        steps=3,
        terminated=True,
        truncated=False,
        seconds=0.1,
        video=None,
        suite=suite,
    )


def test_episodes_of_different_suites_are_not_paired() -> None:
    """Fails if tasks with equal names and numbers are treated as the same episodes."""
    first = [row(0, 1.0, suite="a"), *(row(k, 1.0, suite="a_swap", task_id=1) for k in (10, 11))]
    second = [row(0, 0.0, suite="a"), *(row(k, 0.0, suite="a_lan", task_id=1) for k in (10, 11))]
    assert [(one.suite, one.pairs) for one in compare_suites(first, second)] == [("a", 1), ("a_lan", 0)]
    alone = [row(0, 0.0)]
    assert [(one.suite, one.pairs) for one in compare_suites(first, alone)] == [("", 1)]


def test_suites_are_paired_regardless_of_their_order() -> None:
    """Reset ids count through all suites, so those of a suite depend on the suites evaluated before it."""

    def evaluation(*order: str, won: str) -> list[EpisodeRow]:
        places = [(name, 10 * place + state, state) for place, name in enumerate(order) for state in (0, 1)]
        return [
            replace(row(i, 1.0 if name == won else 0.0, suite=name, task_id=i // 10), state=state)
            for name, i, state in places
        ]

    first, second = evaluation("a", "b", "c", won="b"), evaluation("a", "c", "b", won="c")
    found = {one.suite: (one.pairs, one.only_first, one.only_second) for one in compare_suites(first, second)}
    assert found == {"a": (2, 0, 0), "c": (2, 0, 2), "b": (2, 2, 0)}
    older = [replace(e, state=None) for e in second]
    assert [one.pairs for one in compare_suites(first, older)] == [2, 0, 0], "earlier versions say reset ids alone"


def test_config_differences_that_change_states_are_found() -> None:
    from embodyrl.reports.history import describe_differences

    one: dict[str, Any] = {"env": {"env_type": "t", "axis": "base", "reward_coef": 1.0}, "data": {"path": "a"}}

    def differs(**groups: dict[str, Any]) -> str | None:
        return describe_differences(one, one | groups, state_keys())

    assert differs(env={"env_type": "t", "reward_coef": 2.0}) is None, "an older run lacks a key"
    assert differs(env={"env_type": "t", "axis": "colours"}) == "env.axis=base and colours"
    assert differs(data={"path": "b"}) == "data.path=a and b"


def test_keys_that_affect_initial_states_are_declared() -> None:
    """The sampled and settled states of LIBERO must be included, and the device of ManiSkill's random numbers."""
    assert {"env.settle_steps", "env.settle_gripper", "env.sim_backend"} <= state_keys()
    assert {"env.env_type", "env.kwargs", "env.task_suite_name", "env.sampled_states", "data.split"} <= state_keys()
    assert not {"env.reward_coef", "env.train.total_num_envs", "data.shuffle"} & state_keys()


def test_return_gain_is_significant_if_its_interval_excludes_zero() -> None:
    before = [row(k, 0.0, known=False) for k in range(4)]
    better = compare_episodes(before, [row(k, 1.0 + 0.1 * k, known=False) for k in range(4)])
    assert better.gain is not None
    assert better.gain.value == pytest.approx(1.15)
    assert better.is_significant
    mixed = compare_episodes(before, [row(k, (-2.0, 1.0, -1.0, 3.0)[k], known=False) for k in range(4)])
    assert mixed.gain is not None
    assert mixed.gain.value == pytest.approx(0.25)
    assert not mixed.is_significant
    assert "no significant difference" in mixed.sentence(("a", "b"))


@pytest.mark.parametrize(
    ("states", "wins", "n"), [(20, 10, 20), (2, 10, 2)], ids=["20 states", "10 pairs of each of 2 states"]
)
def test_difference_interval_counts_repeated_states_once(states: int, wins: int, n: int) -> None:
    """20 pairs, of which 10 are won: Bonett and Price by hand, with the states as sample size."""
    changes = [(k * states // 20, int(k < wins)) for k in range(20)]
    won, lost = (n / 2 + 1) / (n + 2), 1 / (n + 2)
    half = 1.96 * ((won + lost - (won - lost) ** 2) / (n + 2)) ** 0.5
    assert rate_difference(changes) == pytest.approx((max(won - lost - half, -1), min(won - lost + half, 1)))


def test_discordant_pairs_are_counted_for_each_evaluation() -> None:
    found = compare_episodes([row(0, 1.0), row(1, 1.0), row(2, 0.0)], [row(0, 0.0), row(1, 0.0), row(2, 1.0)])
    assert (found.only_first, found.only_second) == (2, 1)


def test_overall_success_once_excludes_other_suites() -> None:
    from embodyrl.reports.history import Evaluation

    own = [row(0, 1.0, suite="base"), row(1, 1.0, suite="base", late=False)]
    evaluation = Evaluation(step=1, episodes=(*own, row(2, 0.0, suite="swap", task_id=5)))
    assert evaluation.score() == Rate(2, 2, 2, 2)
    assert evaluation.score("t") == Rate(2, 2, 2, 2)
    assert {name: score.value for name, score in evaluation.suites.items()} == {"base": 1.0, "swap": 0.0}


def test_samples_of_one_state_are_paired_by_number() -> None:
    """`eval.samples`: fails if every sample is compared with the last sample of the other evaluation."""
    drawn = [row(k, won) for won in (1.0, 0.0, 1.0, 0.0) for k in range(10)]
    samples = [replace(one, episode=number) for number, one in enumerate(drawn)]
    same = compare_episodes(samples, list(reversed(samples)))
    assert (same.pairs, same.num_states, same.only_first, same.only_second, same.p_value) == (40, 10, 0, 0, 1.0)
    fewer = compare_episodes(samples[:10], samples)
    assert (fewer.pairs, fewer.only_first, fewer.only_second) == (10, 0, 0)


def test_pairs_of_one_initial_state_form_one_cluster():
    assert mcnemar([1] * 4 + [-1]) == pytest.approx(12 / 32)  # one pair per state: the binomial, 2 * (1 + 5) / 2^5
    assert mcnemar([10] * 5) == pytest.approx(2 / 32)
    assert mcnemar([]) == mcnemar([0, 0]) == 1.0
    exact = 2 * sum(math.comb(4050, k) for k in range(2001)) / 2**4050
    assert mcnemar([1] * 2050 + [-1] * 2000) == pytest.approx(exact, rel=1e-3)
    assert mcnemar([10] * 205 + [-10] * 203) == pytest.approx(mcnemar([1] * 205 + [-1] * 203), rel=1e-3)
    assert mcnemar([3, 1, -2]) == pytest.approx(sum(abs(a * 3 + b + c * 2) >= 2 for a, b, c in SIGNS) / 8)


SIGNS = [(a, b, c) for a in (1, -1) for b in (1, -1) for c in (1, -1)]
