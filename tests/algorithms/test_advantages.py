import numpy as np
import pytest
from algorithm_cases import (
    GAE_RAW,
    GAE_RETURNS,
    GAE_WHITENED,
    GAMMA,
    GROUPS,
    GRPO_REFERENCE,
    LAM,
    LENGTHS,
    REWARDS,
    VALID,
    VALUE,
    token_rewards,
)

from embodyrl.algorithms.estimators import gae, grpo, whiten


def reference_gae() -> tuple[np.ndarray, np.ndarray]:
    rows = [gae(token_rewards()[b], VALUE[b], 0.0, VALID[b], gamma=GAMMA, lam=LAM) for b in range(len(LENGTHS))]
    return np.stack([a for a, _ in rows]), np.stack([g for _, g in rows])


def test_grpo_matches_reference():
    np.testing.assert_allclose(grpo(REWARDS, GROUPS), GRPO_REFERENCE, atol=1e-6)


def test_dr_grpo_matches_reference():
    np.testing.assert_allclose(grpo(REWARDS, GROUPS, normalize=False), [0.5, -0.5, 0, 1, -2, 1], atol=1e-6)


def test_grpo_supports_the_biased_standard_deviation():
    expected = [1.224742, -1.224742, 0, 0.707106, -1.414213, 0.707106]
    np.testing.assert_allclose(grpo(REWARDS, GROUPS, unbiased=False), expected, atol=1e-6)


def test_grpo_does_not_depend_on_the_order_of_episodes():
    order = np.array([4, 0, 2, 5, 1, 3])
    shuffled = grpo(np.array(REWARDS)[order], np.array(GROUPS)[order])
    np.testing.assert_allclose(shuffled, np.array(GRPO_REFERENCE)[order], atol=1e-6)


def test_advantage_of_a_single_episode_group_is_zero():
    found = grpo([3.0, 1.0, 0.0], [0, 1, 1])
    assert found[0] == 0
    assert found[1] > 0


def test_grpo_advantage_of_equal_rewards_is_exactly_zero():
    # the mean of three 0.1 is not 0.1 in floating point: a plain formula would return about 1e-11
    assert np.mean([0.1] * 3) != 0.1
    np.testing.assert_array_equal(grpo([0.1] * 3, [7] * 3), 0.0)


def test_gae_matches_reference():
    raw, returns = reference_gae()
    np.testing.assert_allclose(raw, GAE_RAW, atol=1e-6)
    np.testing.assert_allclose(returns, GAE_RETURNS, atol=1e-6)


def test_whiten_matches_reference():
    raw, _ = reference_gae()
    out = np.zeros_like(raw)
    out[VALID] = whiten(raw[VALID])
    np.testing.assert_allclose(out, GAE_WHITENED, atol=1e-6)


@pytest.mark.parametrize(("bootstrap", "last"), [(0.0, 1.0 - 0.5), (2.0, 1.0 + 0.9 * 2.0 - 0.5)])
def test_gae_bootstraps_truncated_but_not_terminated_episodes(bootstrap: float, last: float):
    advantage, returns = gae([0.0, 1.0], [0.3, 0.5], bootstrap, [True, True], gamma=0.9, lam=0.8)
    first = 0.9 * 0.5 - 0.3 + 0.9 * 0.8 * last
    np.testing.assert_allclose(advantage, [first, last], rtol=1e-12)
    np.testing.assert_allclose(returns, [first + 0.3, last + 0.5], rtol=1e-12)


def test_gae_skips_invalid_steps():
    dense = gae([1.0, 2.0], [0.1, 0.2], 0.7, [True, True], gamma=0.9, lam=0.8)
    holed = gae([1.0, 55.0, 2.0], [0.1, 99.0, 0.2], 0.7, [True, False, True], gamma=0.9, lam=0.8)
    for with_hole, without in zip(holed, dense, strict=True):
        np.testing.assert_allclose(with_hole[[0, 2]], without, rtol=1e-12)
        assert with_hole[1] == 0


def test_whiten_of_fewer_than_two_values_is_zero():
    np.testing.assert_array_equal(whiten([5.0]), [0.0])
    assert whiten([]).size == 0
