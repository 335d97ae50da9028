"""Losses and networks of implicit Q-learning against hand-computed values and exact solutions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embodyrl.algorithms.iql.estimator import IqlSettings
from embodyrl.algorithms.iql.losses import compute_advantage_weights, critic_loss, expectile_loss
from embodyrl.learners.iql.values import IqlValues
from embodyrl.learners.settings import OptimSettings


def expectile(data: np.ndarray, tau: float) -> float:
    """Return m with tau E[(x - m)+] = (1 - tau) E[(m - x)+], by bisection."""
    low, high = float(data.min()), float(data.max())
    for _ in range(80):
        middle = (low + high) / 2
        gain = tau * np.maximum(data - middle, 0).sum() - (1 - tau) * np.maximum(middle - data, 0).sum()
        low, high = (middle, high) if gain > 0 else (low, middle)
    return low


def test_expectile_loss_matches_a_hand_computed_table():
    difference = torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    assert expectile_loss(difference, 0.7).tolist() == pytest.approx([1.2, 0.3, 0.0, 0.175, 6.3])
    assert expectile_loss(difference, 0.5).tolist() == pytest.approx([2.0, 0.5, 0.0, 0.125, 4.5])


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9])
def test_minimum_of_the_loss_is_the_expectile(tau):
    data = np.random.default_rng(0).gumbel(size=40)

    grid = torch.linspace(-2.0, 6.0, 8001, dtype=torch.float64)
    loss = expectile_loss(torch.from_numpy(data)[:, None] - grid, tau).mean(0)
    assert float(grid[loss.argmin()]) == pytest.approx(expectile(data, tau), abs=1e-3)


def test_iql_gradients_match_finite_differences():
    generator = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda u: expectile_loss(u, 0.8), (filled(6),))
    assert torch.autograd.gradcheck(critic_loss, (filled(2, 5), filled(5), filled(5), filled(5)))
    assert torch.autograd.gradcheck(lambda a: compute_advantage_weights(a, 2.0, 100.0), (filled(6),))


def test_critic_loss_sums_critics_and_averages_samples():
    value, reward = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([1.0, 0.5])
    found = critic_loss(value, reward, torch.tensor([0.9, 0.0]), torch.tensor([2.0, 100.0]))
    assert float(found) == pytest.approx((1.8**2 + 1.5**2) / 2 + (2.8**2 + 3.5**2) / 2)


def test_advantage_weights_are_clipped_exponentials():
    found = compute_advantage_weights(torch.tensor([-1.0, 0.0, 1.0, 1e9]), 3.0, 10.0)
    assert found.tolist() == pytest.approx([math.exp(-3.0), 1.0, 10.0, 10.0])
    assert compute_advantage_weights(torch.tensor([-5.0, 1e9]), 0.0, 10.0).tolist() == [1.0, 1.0]


STATES = [0, 0, 0, 1, 1, 2]
ACTIONS = [0, 1, 1, 0, 1, 0]
AFTER = [1, 0, 0, 2, 0, 2]
REWARD = [0.0, 0.2, 0.2, 0.0, 0.5, 1.0]
DISCOUNT = [0.9, 0.9, 0.9, 0.9, 0.9, 0.0]
"""Data of a deterministic problem with three states: action 0 leads to a final reward, action 1 to smaller ones."""


def exact(tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Return Q of each row and V of each state: Q = r + d V(s'), V = the expectile of Q over the rows of a state."""
    v = np.zeros(3)
    for _ in range(150):
        q = np.array(REWARD) + np.array(DISCOUNT) * v[AFTER]
        v = np.array([expectile(q[np.array(STATES) == state], tau) for state in range(3)])
    return q, v


@pytest.mark.parametrize("tau", [0.5, 0.9])
def test_iql_training_converges_to_the_exact_solution(tau):
    q, v = exact(tau)
    rules = IqlSettings().updated({"expectile": tau, "critic_width": 32, "tau": 0.1})
    optim = OptimSettings().updated({"value_lr": 3e-3})
    features, actions = torch.eye(3)[STATES], torch.tensor(ACTIONS).float()[:, None]
    values, frames = IqlValues(features, actions, rules, optim, 0), torch.arange(6)
    # The next state of a row, as a row with that state.
    after = torch.tensor([STATES.index(state) for state in AFTER])
    for _ in range(700):
        found = values.update(frames, after, torch.tensor(REWARD), torch.tensor(DISCOUNT))
    assert not isinstance(found, str)
    assert found[0].numpy() == pytest.approx(q - v[STATES], abs=0.03)
    assert found[1]["value"] == pytest.approx(q.mean(), abs=0.03)


def test_non_finite_iql_loss_leaves_the_networks_unchanged():
    values = IqlValues(torch.eye(3), torch.zeros(3, 1), IqlSettings(), OptimSettings(), 0)
    row = torch.zeros(1, dtype=torch.int64)
    before = [weight.clone() for weight in values.critics.parameters()]
    assert values.update(row, row, torch.tensor([math.inf]), torch.tensor([0.9])) == "critics"
    assert all(torch.equal(a, b) for a, b in zip(before, values.critics.parameters(), strict=True))


def test_restored_iql_networks_keep_their_features():
    first, other = (
        IqlValues(features, torch.zeros(3, 1), IqlSettings(), OptimSettings(), 0)
        for features in (torch.eye(3), torch.arange(9.0).reshape(3, 3) ** 2)
    )
    assert not torch.equal(first._features, other._features)
    other.load_state(first.state())
    assert torch.equal(first._features, other._features)
