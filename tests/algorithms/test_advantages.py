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

from embodyrl.algorithms.estimators import discounted, gae, step_groups
from embodyrl.algorithms.outcomes import gdpo, gpg, grpo, opo, pass_at_k, rloo, whiten


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


def test_rloo_matches_reference():
    np.testing.assert_allclose(rloo(REWARDS, GROUPS), [0.75, -0.75, 0, 1.5, -3, 1.5], atol=1e-6)


def test_opo_matches_reference():
    expected = [0.416667, -0.583333, -0.083333, 1.875, -1.125, 1.875]
    np.testing.assert_allclose(opo(REWARDS, GROUPS, LENGTHS), expected, atol=1e-6)


def test_gpg_scales_by_the_fraction_of_rewarded_episodes():
    np.testing.assert_allclose(gpg(REWARDS, GROUPS), 6 / 5 * np.array([0.5, -0.5, 0, 1, -2, 1]), atol=1e-12)
    np.testing.assert_array_equal(gpg([0.0, 0.0], [1, 1]), 0.0)


def test_pass_at_k_credits_the_best_episode_only():
    np.testing.assert_allclose(pass_at_k([1, 0, 0.5], [0, 0, 0], normalize=False), [0.5, 0, 0])
    np.testing.assert_allclose(pass_at_k([1, 0, 0.5], [0, 0, 0]), [0.5 / (0.5 + 1e-6), 0, 0])
    np.testing.assert_array_equal(pass_at_k([2.0, -1.0, 2.0], [0, 0, 0], normalize=False), 0.0)  # no lead


def test_gdpo_sums_normalised_components_and_whitens_the_batch():
    other, weight = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), (1.0, 0.5)
    third = np.sqrt(1 / 3)
    normalised = np.array([-third, 2 * third, -third, third, third, -2 * third])  # (x - 1/3) / sqrt(1/3) and mirrored
    total = np.array(GRPO_REFERENCE) + 0.5 * normalised
    expected = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(gdpo(np.stack([REWARDS, other], 1), GROUPS, weight), expected, atol=1e-5)
    louder = gdpo(np.stack([REWARDS, 100 * other], 1), GROUPS, weight)
    np.testing.assert_allclose(louder, expected, atol=1e-5)


def test_gdpo_advantage_of_a_group_of_one_is_zero():
    found = gdpo([[1.0], [0.0], [5.0]], [0, 0, 1], [1.0])
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0], atol=1e-5)


def test_return_to_go_skips_invalid_steps():
    np.testing.assert_allclose(discounted([1, 9, 2], [True, False, True], gamma=0.5), [2.0, 0, 2.0])


def test_steps_are_grouped_by_state_within_a_group():
    states = [np.array([5, 6]), np.array([6, 7]), np.array([5])]
    np.testing.assert_array_equal(step_groups(states, [0, 0, 1]), [0, 1, 1, 2, 3])


def test_grpo_does_not_depend_on_the_order_of_episodes():
    order = np.array([4, 0, 2, 5, 1, 3])
    shuffled = grpo(np.array(REWARDS)[order], np.array(GROUPS)[order])
    np.testing.assert_allclose(shuffled, np.array(GRPO_REFERENCE)[order], atol=1e-6)


@pytest.mark.parametrize("estimate", [grpo, rloo, gpg, pass_at_k, lambda r, g: opo(r, g, [1, 2, 3])])
def test_advantage_of_a_group_of_one_is_zero(estimate):
    found = estimate([3.0, 1.0, 0.0], [0, 1, 1])
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
