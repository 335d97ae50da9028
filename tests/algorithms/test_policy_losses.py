"""Values and gradients of every policy loss against independently computed reference values."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_cases import GRPO_REFERENCE, LOGPROB, OLD_LOGPROB, VALID
from settings import algorithm_of

from embodyrl.algorithms.policy_losses import action_weights
from embodyrl.algorithms.protocol import LOSSES, LossTerms, LossUnits
from embodyrl.algorithms.settings import AlgorithmSettings, TokenLevel


def weights(mode: str) -> torch.Tensor:
    """[6, 5, 1] weights of the fixed input: six sequences of one sample each."""
    raw = action_weights(mode, np.arange(6), VALID, level=TokenLevel.token_level, longest_episode=1)
    return torch.from_numpy(raw).double()[:, :, None]


def fixed_units(logprob: np.ndarray = LOGPROB) -> tuple[torch.Tensor, LossUnits]:
    """The leaf [6, 5] and the units; padding holds zeros, as the algorithm leaves it."""
    leaf = torch.from_numpy(np.where(VALID, logprob, 0.0)).requires_grad_()
    units = LossUnits(
        logprob=leaf[:, :, None],
        old_logprob=torch.from_numpy(np.where(VALID, OLD_LOGPROB, 0.0))[:, :, None],
        advantage=torch.tensor(GRPO_EXACT, dtype=torch.float64)[:, None, None].expand(6, 5, 1)
        * torch.from_numpy(VALID)[:, :, None],
        valid=torch.from_numpy(VALID)[:, :, None],
    )
    return leaf, units


GRPO_EXACT = [0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), 0.0, *(r / (3**0.5 + 1e-6) for r in (1.0, -2.0, 1.0))]


def test_precomputed_advantages_match_the_reference():
    np.testing.assert_allclose(GRPO_EXACT, GRPO_REFERENCE, atol=1e-6)


def bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high}


def config(low: float, high: float, **changes: Any) -> AlgorithmSettings:
    return algorithm_of(**bounds(low, high), **changes)


def compute(name: str, keys: dict[str, Any], mode: str) -> tuple[float, torch.Tensor, LossTerms]:
    leaf, units = fixed_units()
    terms = LOSSES.get(name).compute(units, algorithm_of(loss_type=name, **keys).loss)
    total = (terms.loss * weights(mode)).sum()
    total.backward()
    assert terms.loss.shape == terms.ratio.shape == terms.clipped.shape == units.logprob.shape
    assert leaf.grad is not None
    assert (leaf.grad[~torch.from_numpy(VALID)] == 0).all()
    return total.item(), leaf.grad, terms


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.075962),
        ("token-sum", 1.519247),
        ("seq-mean-token-sum", 0.253208),
        ("seq-mean-token-mean", -0.006615),
        ("seq-mean-token-sum-norm", 0.050642),
    ],
)
def test_aggregations_match_reference(mode: str, expected: float):
    value, _, _ = compute("ppo_clip", bounds(0.1, 0.1), mode)
    assert value == pytest.approx(expected, abs=1e-5)


OTHER_LOSSES: list[tuple[Any, ...]] = [
    ("gspo", bounds(0.03, 0.04), "seq-mean-token-mean", 0.006472, -0.006871, 0.152168),
    ("gmpo", bounds(0.1, 0.1), "seq-mean-token-mean", -0.006412, -0.029437, 0.160868),
    ("sapo", {}, "seq-mean-token-mean", -0.051417, -0.016875, 0.189970),
    ("cispo", bounds(0.1, 0.1), "token-mean", -0.201200, 0.075962, 0.199602),
    ("dro", {"log_ratio_coef": 0.5}, "token-mean", -0.218497, 0.107073, 0.192931),
    ("pg", {}, "token-mean", -0.221172, 0.102073, 0.197905),
    ("aipo", {"ratio_max": 1.02}, "token-mean", -0.195664, 0.077344, 0.191724),
    ("aipo_ratio", {"ratio_max": 1.02}, "token-mean", 0.077344, 0.098899, 0.119232),
    ("topr", {}, "token-mean", -0.190467, 0.073565, 0.189981),
]


@pytest.mark.parametrize(
    ("name", "keys", "mode", "expected", "grad_sum", "grad_norm"),
    [
        ("ppo_clip", bounds(0.1, 0.1), "token-mean", 0.075962, 0.064870, 0.137686),
        ("ppo_clip", bounds(0.1, 0.2), "token-mean", 0.067142, -0.080704, 0.162555),
        ("ppo_clip", {**bounds(0.1, 0.1), "clip_ratio_c": 1.05}, "token-mean", 0.072586, -0.096006, 0.101639),
        *(pytest.param(*case) for case in OTHER_LOSSES),
    ],
)
def test_loss_and_gradient_match_reference(
    name: str, keys: dict, mode: str, expected: float, grad_sum: float, grad_norm: float
):
    value, gradient, _ = compute(name, keys, mode)
    assert value == pytest.approx(expected, abs=2e-6)
    assert gradient.sum().item() == pytest.approx(grad_sum, abs=2e-6)
    assert gradient.norm().item() == pytest.approx(grad_norm, abs=2e-6)


def test_gspo_uses_the_mean_token_ratio():
    value, _, terms = compute("gspo", bounds(0.03, 0.04), "token-mean")
    assert value == pytest.approx(0.095901, abs=2e-6)
    expected = [1.107383, 1.072508, 1.007528, 1.015113, 0.906649, 0.913931]
    np.testing.assert_allclose(terms.ratio[:, 0, 0].detach(), expected, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES.names())
def test_every_loss_has_the_policy_gradient_at_ratio_one(name: str):
    """At r = 1 nothing is clipped and the gradient of the sum is -A; penalties of dro and kl_cov have zero gradient."""
    leaf, units = fixed_units(OLD_LOGPROB)
    mode = "seq-mean-token-mean"
    cfg = algorithm_of(loss_type=name, **({"cov_bounds": [90.0, 91.0]} if name == "clip_cov" else {}))
    (LOSSES.get(name).compute(units, cfg.loss).loss * weights(mode)).sum().backward()
    expected = -(units.advantage * weights(mode))[:, :, 0]
    torch.testing.assert_close(leaf.grad, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ppo_clip", bounds(0.2, 0.28)),
        ("ppo_clip", {**bounds(0.2, 0.28), "clip_ratio_c": 1.05}),
        pytest.param("aipo_ratio", {}),
    ],
)
def test_clip_mask_marks_exactly_the_tokens_without_gradient(name: str, keys: dict):
    logprob = torch.linspace(-1, 1, 41, dtype=torch.float64).repeat(2).requires_grad_()
    advantage = torch.cat([torch.ones(41), -torch.ones(41)]).double()
    units = LossUnits(
        logprob=logprob[:, None, None],
        old_logprob=torch.zeros(82, 1, 1).double(),
        advantage=advantage[:, None, None],
        valid=torch.ones(82, 1, 1, dtype=torch.bool),
    )
    terms = LOSSES.get(name).compute(units, algorithm_of(loss_type=name, **keys).loss)
    terms.loss.sum().backward()
    assert torch.equal(terms.clipped.flatten(), logprob.grad == 0)
    assert 0 < terms.clipped.sum() < 82


def test_ratio_of_distant_policies_stays_finite():
    _, units = fixed_units()
    far = replace(units, logprob=units.logprob + 500.0)
    for name in LOSSES.names():
        terms = LOSSES.get(name).compute(far, algorithm_of(loss_type=name).loss)
        assert torch.isfinite(terms.loss).all(), name


def covariance_units() -> LossUnits:
    """Four units; the covariance of A and log pi is 2.25 for the first and last, 0.25 for the others."""
    return LossUnits(
        logprob=torch.tensor([[[-3.0]], [[-2.0]], [[-1.0]], [[0.0]]], requires_grad=True),
        old_logprob=torch.tensor([[[-3.0]], [[-2.0]], [[-1.0]], [[0.0]]]),
        advantage=torch.tensor([[[-1.5]], [[-0.5]], [[0.5]], [[1.5]]]),
        valid=torch.ones(4, 1, 1, dtype=torch.bool),
    )


def test_clip_cov_drops_tokens_of_large_covariance():
    cfg = algorithm_of(loss_type="clip_cov", cov_share=0.5, cov_bounds=[1.0, 5.0])
    terms = LOSSES.get("clip_cov").compute(covariance_units(), cfg.loss)
    assert terms.clipped.flatten().tolist() == [True, False, False, True]
    np.testing.assert_allclose(terms.loss.detach().flatten(), [0.0, 0.5, -0.5, 0.0])


def test_kl_cov_penalizes_tokens_of_large_covariance():
    units = covariance_units()
    moved = replace(units, old_logprob=units.old_logprob - 0.1)
    cfg = algorithm_of(loss_type="kl_cov", cov_share=0.5, log_ratio_coef=10.0)
    loss = LOSSES.get("kl_cov").compute(moved, cfg.loss).loss.detach().flatten()
    np.testing.assert_allclose(loss, -units.advantage.flatten().numpy() * np.exp(0.1) + [1, 0, 0, 1], rtol=1e-5)


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.5, 2)])
def test_kl_cov_penalizes_a_fixed_fraction_for_equal_advantages(share: float, count: int):
    units = covariance_units()
    tied = replace(units, old_logprob=units.old_logprob - 0.1, advantage=torch.ones(4, 1, 1))
    cfg = algorithm_of(loss_type="kl_cov", cov_share=share, log_ratio_coef=10.0)
    loss = LOSSES.get("kl_cov").compute(tied, cfg.loss).loss.detach().flatten().numpy() + np.exp(0.1)
    np.testing.assert_allclose(np.sort(loss), [0] * (4 - count) + [1] * count, atol=1e-5)
