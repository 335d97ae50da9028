"""Off-policy corrections against reference values on a fixed input."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import BEHAVIOUR_LOGPROB, LOGPROB, OLD_LOGPROB, VALID, reference_episodes
from test_policy_losses import bounds, compute, config, fixed_units, weights

from embodyrl.algorithms.importance_weights import importance_weights, off_policy_mask, second_moment_mask
from embodyrl.algorithms.metrics import compute_metrics
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import LOSSES, LossInputs
from embodyrl.algorithms.settings import OldLogprob, WeightLevel, WeightMode
from embodyrl.types import PolicyScores

MASK = torch.from_numpy(VALID)
LOG_WEIGHT = torch.from_numpy(np.where(VALID, OLD_LOGPROB - BEHAVIOUR_LOGPROB, 0.0))


@pytest.mark.parametrize(
    ("mode", "cap", "expected", "grad_sum", "grad_norm"),
    [
        (WeightMode.mask, 1e9, 0.086288, None, None),
        (WeightMode.mask, 1.1, 0.065107, 0.070760, 0.107462),
        (WeightMode.truncate, 1.1, 0.085160, 0.071928, 0.135539),
    ],
)
def test_decoupled_ppo_weights_match_reference(
    mode: WeightMode, cap: float, expected: float, grad_sum: float | None, grad_norm: float | None
):
    leaf, units = fixed_units()
    factor = importance_weights(LOG_WEIGHT, MASK, cap=cap, mode=mode, level=WeightLevel.token)
    terms = LOSSES.get("ppo_clip").compute(units, config(0.1, 0.1).loss)
    total = (terms.loss * factor[:, :, None] * weights("token-mean")).sum()
    total.backward()
    assert total.item() == pytest.approx(expected, abs=2e-6)
    if grad_sum is not None:
        assert leaf.grad.sum().item() == pytest.approx(grad_sum, abs=2e-6)
        assert leaf.grad.norm().item() == pytest.approx(grad_norm, abs=2e-6)


def test_sequence_weights_match_hand_computed_values():
    log_weight = torch.tensor([[0.1, 0.3, 9.0], [-0.2, 0.0, 0.0]]).double()
    valid = torch.tensor([[True, True, False], [True, False, False]])
    for level, expected in ((WeightLevel.sequence, [0.4, -0.2]), (WeightLevel.geometric, [0.2, -0.2])):
        weight = importance_weights(log_weight, valid, cap=9.0, mode=WeightMode.mask, level=level)
        np.testing.assert_allclose(weight, np.exp(expected)[:, None].repeat(3, 1))


@pytest.mark.parametrize(("threshold", "kept"), [(0.012, 10), (0.0225, None), (1e-9, None)])
def test_second_moment_mask_matches_reference(threshold: float, kept: int | None):
    mask = second_moment_mask(LOG_WEIGHT, MASK, threshold=threshold)
    moment = LOG_WEIGHT.square()
    if kept is not None:
        assert mask.sum() == kept
    assert mask.any()
    assert not (mask & ~MASK).any()
    assert moment[mask].max() <= moment[MASK & ~mask].min() if (MASK & ~mask).any() else True


def test_off_policy_mask_matches_reference():
    _, units = fixed_units()
    drift = units.mean(units.old_logprob - units.logprob.detach())
    np.testing.assert_allclose(drift.flatten(), [-0.102, -0.07, -0.0075, -0.015, 0.098, 0.09], atol=1e-12)
    keep = off_policy_mask(drift, units.advantage, delta=0.02)
    assert keep[:, 0, 0].tolist() == [True, True, True, True, False, True]


def test_off_policy_mask_removes_samples_from_the_loss():
    algorithm = Algorithm(config(0.1, 0.1, group_size=3, off_policy_masking_delta=0.02))
    loss, _ = algorithm.loss(scores(), inputs(algorithm))
    assert loss.item() == pytest.approx(-0.191975, abs=2e-6)


def test_off_policy_mask_uses_rollout_log_probabilities():
    """The engine gave the fifth sequence the ratio of the test above; recomputed log-probs hide the mismatch."""
    algorithm = Algorithm(config(0.1, 0.1, group_size=3, off_policy_masking_delta=0.02))
    same = {"old_logprob": torch.from_numpy(LOGPROB)}
    recomputed = replace(inputs(algorithm), **same, behavior_logprob=torch.from_numpy(OLD_LOGPROB))
    leaf = torch.from_numpy(LOGPROB).requires_grad_()
    algorithm.loss(scores(leaf), recomputed)[0].backward()
    assert leaf.grad.abs().sum(dim=1).tolist()[4] == 0
    assert (leaf.grad.abs().sum(dim=1)[[0, 1, 3, 5]] > 0).all()


def test_positive_nll_term_matches_reference():
    total, _, _ = compute("ppo_clip", bounds(0.1, 0.1), "token-mean")
    algorithm = Algorithm(config(0.1, 0.1, group_size=3, positive_nll_coef=2.0))
    loss, _ = algorithm.loss(scores(), inputs(algorithm))
    assert loss.item() - total == pytest.approx(2.0 * 0.53, abs=2e-6)


def test_unbiased_kl_matches_reference():
    beta = 0.5
    total, _, _ = compute("ppo_clip", bounds(0.1, 0.1), "token-mean")
    algorithm = Algorithm(config(0.1, 0.1, group_size=3, kl_beta=beta, kl_penalty_type="k3_unbiased"))
    leaf = torch.from_numpy(LOGPROB).requires_grad_()
    loss, measured = algorithm.loss(scores(leaf), inputs(algorithm))
    assert compute_metrics([measured])[0]["ref_kl"] == pytest.approx(0.010434, abs=2e-6)
    assert loss.item() - total == pytest.approx(beta * 0.010434, abs=2e-6)
    plain = Algorithm(config(0.1, 0.1, group_size=3))
    base = torch.from_numpy(LOGPROB).requires_grad_()
    plain.loss(scores(base), inputs(plain))[0].backward()
    loss.backward()
    gradient = (leaf.grad - base.grad) / beta
    assert gradient.sum().item() == pytest.approx(-0.012103, abs=2e-6)
    assert gradient.norm().item() == pytest.approx(0.031769, abs=2e-6)


def test_off_policy_correction_multiplies_weights_and_mask():
    recompute = {"old_logprob": OldLogprob.recompute, "group_size": 3}
    cfg = config(0.1, 0.1, behave_weight_threshold=1.1, m2_threshold=0.012, **recompute)
    proximal, behavior = torch.from_numpy(OLD_LOGPROB), torch.from_numpy(BEHAVIOUR_LOGPROB)
    factors, metrics = Algorithm(cfg).correct(proximal, behavior, MASK)
    weight = importance_weights(LOG_WEIGHT, MASK, cap=1.1, mode=WeightMode.mask, level=WeightLevel.token)
    expected = weight * second_moment_mask(LOG_WEIGHT, MASK, threshold=0.012)
    torch.testing.assert_close(factors[:, :, 0], expected)
    assert metrics["behaviour_removed"] == pytest.approx((expected[MASK] == 0).double().mean().item())
    nothing, metrics = Algorithm(config(0.1, 0.1, **recompute)).correct(proximal, behavior, MASK)
    assert nothing is None
    assert metrics["behaviour_gap"] == pytest.approx(LOG_WEIGHT[MASK].abs().mean().item())


@pytest.mark.parametrize("mode", list(WeightMode))
@pytest.mark.parametrize("level", list(WeightLevel))
def test_importance_weights_depend_on_mode_and_level(mode: WeightMode, level: WeightLevel):
    keys = {"behave_weight_threshold": 1.1, "behave_weight_mode": mode, "behave_weight_level": level}
    algorithm = Algorithm(config(0.1, 0.1, group_size=3, old_logprob=OldLogprob.recompute, **keys))
    factors, _ = algorithm.correct(torch.from_numpy(OLD_LOGPROB), torch.from_numpy(BEHAVIOUR_LOGPROB), MASK)
    expected = importance_weights(LOG_WEIGHT, MASK, cap=1.1, mode=mode, level=level)
    torch.testing.assert_close(factors[:, :, 0][MASK], expected[MASK])


def scores(leaf: torch.Tensor | None = None) -> PolicyScores:
    logprob = torch.from_numpy(LOGPROB) if leaf is None else leaf
    return PolicyScores(logprob=logprob, entropy=torch.zeros(6, 5).double(), value=torch.zeros(6, 0))


def inputs(algorithm) -> LossInputs:
    """The fixed input: each sequence is a sample of five one-token actions."""
    from algorithm_cases import REF_LOGPROB

    episodes = reference_episodes()
    advantage = algorithm.prepare(episodes)
    per_episode = np.array([advantage.advantage[advantage.episode == i][0, 0] for i in range(6)])
    positive = VALID & (per_episode[:, None] > 0)
    return LossInputs(
        old_logprob=torch.from_numpy(OLD_LOGPROB),
        ref_logprob=torch.from_numpy(REF_LOGPROB),
        advantage=torch.from_numpy(np.where(VALID, per_episode[:, None], 0.0)).double(),
        returns=torch.zeros(6, 0),
        old_value=torch.zeros(6, 0),
        valid=MASK,
        weight=weights("token-mean")[:, :, 0],
        value_weight=torch.zeros(6, 0),
        positive_weight=torch.from_numpy(positive / positive.sum()),
    )


def test_off_policy_mask_and_importance_weights_are_combined():
    """Fails if the mask replaces the weights instead of multiplying them."""
    algorithm = Algorithm(config(0.1, 0.1, group_size=3, off_policy_masking_delta=0.02))
    factor = torch.linspace(0.5, 1.5, 30).double().reshape(6, 5, 1)
    terms = LOSSES.get("ppo_clip").compute(fixed_units()[1], config(0.1, 0.1).loss)
    kept = torch.tensor([True, True, True, True, False, True])[:, None, None]
    expected = (terms.loss * factor * kept * weights("token-mean")).sum().item()
    loss, _ = algorithm.loss(scores(), replace(inputs(algorithm), correction=factor))
    assert loss.item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", -0.023), ("abs", 0.124), ("k2", 0.01046), ("k3", 0.010765)])
def test_kl_is_added_to_the_loss_unless_kl_in_reward_is_set(kind: str, expected: float):
    total, _, _ = compute("ppo_clip", bounds(0.1, 0.1), "token-mean")
    for paid in (False, True):
        keys = {"kl_beta": 0.5, "kl_penalty_type": kind, "kl_in_reward": paid, "group_size": 3}
        algorithm = Algorithm(config(0.1, 0.1, **keys))
        # The advantages are those without a reference: here nothing but the loss is looked at.
        given = inputs(Algorithm(config(0.1, 0.1, group_size=3)))
        loss, measured = algorithm.loss(scores(), given)
        assert compute_metrics([measured])[0]["ref_kl"] == pytest.approx(expected, abs=2e-6)
        assert loss.item() - total == pytest.approx(0.0 if paid else 0.5 * expected, abs=2e-6)
