import numpy as np
import pytest
import torch
from algorithm_cases import (
    LENGTHS,
    LOGPROB,
    NEW_VALUE,
    REF_LOGPROB,
    VALID,
    VALUE,
)

from embodyrl.algorithms.estimators import gae
from embodyrl.algorithms.policy_losses import action_weights
from embodyrl.algorithms.settings import TokenLevel
from embodyrl.algorithms.terms import kl, value_loss

EPISODE = np.nonzero(VALID)[0]
FLAT_VALID = np.ones((len(EPISODE), 1), dtype=bool)


def valid_tokens(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values[VALID], dtype=torch.float64)


def weights(mode: str) -> torch.Tensor:
    raw = action_weights(mode, EPISODE, FLAT_VALID, level=TokenLevel.token_level, longest_episode=max(LENGTHS))
    return torch.from_numpy(raw[:, 0]).double()


@pytest.mark.parametrize(
    ("kind", "expected", "grad_sum", "grad_norm"),
    [
        ("k1", -0.023, 1.0, 0.223607),
        ("k2", 0.01046, -0.023, 0.032342),
        ("low_var_kl", 0.010765, -0.033765, 0.033951),
        ("k3", 0.010765, -0.033765, 0.033951),
        ("k3+", 0.010765, -0.023, 0.032342),
        ("abs", 0.124, None, None),
    ],
)
def test_kl_estimators_match_reference(kind: str, expected: float, grad_sum: float | None, grad_norm: float | None):
    logprob = valid_tokens(LOGPROB).requires_grad_()
    loss = (kl(logprob, valid_tokens(REF_LOGPROB), kind) * weights("token-mean")).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    if grad_sum is not None:
        assert logprob.grad.sum().item() == pytest.approx(grad_sum, abs=1e-5)
        assert logprob.grad.norm().item() == pytest.approx(grad_norm, abs=1e-5)


def test_low_var_kl_is_bounded():
    far = kl(torch.tensor([-500.0, 500.0]), torch.zeros(2), "low_var_kl")
    torch.testing.assert_close(far, torch.tensor([10.0, 10.0]))


@pytest.mark.parametrize(
    ("clip", "huber", "expected"), [(0.2, None, 0.355186), (None, None, 0.345871), (0.2, 0.5, 0.236506)]
)
def test_value_loss_matches_reference(clip: float | None, huber: float | None, expected: float):
    rewards = np.zeros((6, 5))
    rewards[np.arange(6), np.array(LENGTHS) - 1] = [1.0, 0.0, 0.5, 2.0, -1.0, 2.0]
    returns = np.stack([gae(rewards[b], VALUE[b], 0.0, VALID[b], gamma=0.9, lam=0.8)[1] for b in range(6)])
    loss = value_loss(valid_tokens(NEW_VALUE), valid_tokens(VALUE), valid_tokens(returns), clip=clip, huber_delta=huber)
    assert loss.mean().item() == pytest.approx(expected, abs=1e-5)
