"""Formulas of other outcome estimators against reference values."""

import numpy as np
import pytest
from algorithm_cases import GROUPS, GRPO_REFERENCE, LENGTHS, REWARDS

from embodyrl.algorithms.objectives.estimators import assign_step_groups, compute_returns_to_go
from embodyrl.algorithms.objectives.outcomes import gdpo, gpg, opo, pass_at_k, rloo


def test_rloo_matches_reference():
    np.testing.assert_allclose(rloo(REWARDS, GROUPS), [0.75, -0.75, 0, 1.5, -3, 1.5], atol=1e-6)


def test_opo_matches_reference():
    expected = [0.416667, -0.583333, -0.083333, 1.875, -1.125, 1.875]
    np.testing.assert_allclose(opo(REWARDS, GROUPS, LENGTHS), expected, atol=1e-6)


def test_gpg_divides_advantages_by_the_fraction_of_rewarded_episodes():
    np.testing.assert_allclose(gpg(REWARDS, GROUPS), 6 / 5 * np.array([0.5, -0.5, 0, 1, -2, 1]), atol=1e-12)
    np.testing.assert_array_equal(gpg([0.0, 0.0], [1, 1]), 0.0)


def test_pass_at_k_credits_the_best_episode_only():
    np.testing.assert_allclose(pass_at_k([1, 0, 0.5], [0, 0, 0], normalize=False), [0.5, 0, 0])
    np.testing.assert_allclose(pass_at_k([1, 0, 0.5], [0, 0, 0]), [0.5 / (0.5 + 1e-6), 0, 0])
    np.testing.assert_array_equal(pass_at_k([2.0, -1.0, 2.0], [0, 0, 0], normalize=False), 0.0)  # no lead


def test_gdpo_sums_normalized_components_and_whitens_the_batch():
    other, weight = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), (1.0, 0.5)
    third = np.sqrt(1 / 3)
    normalized = np.array([-third, 2 * third, -third, third, third, -2 * third])  # (x - 1/3) / sqrt(1/3) and mirrored
    total = np.array(GRPO_REFERENCE) + 0.5 * normalized
    expected = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(gdpo(np.stack([REWARDS, other], 1), GROUPS, weight), expected, atol=1e-5)
    louder = gdpo(np.stack([REWARDS, 100 * other], 1), GROUPS, weight)
    np.testing.assert_allclose(louder, expected, atol=1e-5)


def test_gdpo_advantage_of_a_group_of_one_is_zero():
    found = gdpo([[1.0], [0.0], [5.0]], [0, 0, 1], [1.0])
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0], atol=1e-5)


def test_return_to_go_skips_invalid_steps():
    np.testing.assert_allclose(compute_returns_to_go([1, 9, 2], [True, False, True], gamma=0.5), [2.0, 0, 2.0])


def test_steps_are_grouped_by_state_within_a_group():
    states = [np.array([5, 6]), np.array([6, 7]), np.array([5])]
    np.testing.assert_array_equal(assign_step_groups(states, [0, 0, 1]), [0, 1, 1, 2, 3])


@pytest.mark.parametrize("estimate", [rloo, gpg, pass_at_k, lambda r, g: opo(r, g, [1, 2, 3])])
def test_advantage_of_a_group_of_one_is_zero(estimate):
    found = estimate([3.0, 1.0, 0.0], [0, 1, 1])
    assert found[0] == 0
    assert found[1] > 0
