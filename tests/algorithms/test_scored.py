"""Record columns without a log-probability do not affect losses, gradients, masks or metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from algorithm_cases import make_episode
from settings import algorithm_of
from test_policy_gradient import D, K, compute_scores, gae_config, inputs_of, ragged_episodes

from embodyrl.algorithms.metrics import compute_metrics, merge_metrics
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES, EstimatorInputs
from embodyrl.algorithms.settings import AggregationMode, TokenLevel, WeightLevel
from embodyrl.types import PolicyScores

EMPTY = 5


def padded(tokens: torch.Tensor) -> torch.Tensor:
    """Return [B, K * D] with additional columns per action, as in records of flow states."""
    return torch.nn.functional.pad(tokens.reshape(len(tokens), K, D), (0, EMPTY)).flatten(1)


def outcome(algorithm: Algorithm, *, pad: bool) -> tuple[Any, ...]:
    """Return loss, gradient, factors and metrics of the same samples, with or without empty columns."""
    widen = padded if pad else torch.clone
    batch = algorithm.prepare(ragged_episodes(1))
    leaf, scores = compute_scores(batch, 1)
    inputs = inputs_of(algorithm, batch, 1)
    behavior = inputs.old_logprob + 0.3 * torch.randn(
        inputs.old_logprob.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    factors, metrics = algorithm.correct(widen(inputs.old_logprob), widen(behavior), inputs.valid)
    assert inputs.ref_logprob is not None
    inputs = replace(
        inputs,
        old_logprob=widen(inputs.old_logprob),
        ref_logprob=widen(inputs.ref_logprob),
        behavior_logprob=widen(behavior),
        correction=factors,
    )
    torch.manual_seed(0)
    loss, measured = algorithm.loss(
        PolicyScores(logprob=widen(scores.logprob), entropy=widen(scores.entropy), value=scores.value), inputs
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.abs().sum() > 0
    return loss, gradient, factors, metrics | merge_metrics(compute_metrics([measured]))


def assert_equal_with_empty_columns(**keys: Any) -> None:
    cfg = gae_config(kl_beta=0.1, entropy_bonus=0.01, **keys)
    one, other = (outcome(Algorithm(cfg, scored=scored), pad=bool(scored)) for scored in (0, D))
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("loss_type", LOSSES.names())
def test_losses_ignore_columns_without_log_prob(loss_type: str, mode: str) -> None:
    assert_equal_with_empty_columns(loss_type=loss_type, loss_agg_func=mode)


CORRECTIONS: list[dict[str, Any]] = [
    *({"behave_weight_threshold": 1.1, "behave_weight_level": level} for level in WeightLevel),
    {"behave_weight_threshold": 1.1, "m2_threshold": 0.01},
    {"m2_threshold": 0.05},
    {"off_policy_masking_delta": 0.01},
    {"positive_nll_coef": 0.3},
    {"kl_penalty_type": "k3_unbiased"},
]


@pytest.mark.parametrize("level", TokenLevel)
@pytest.mark.parametrize("keys", CORRECTIONS, ids=lambda keys: " ".join(map(str, keys.items())))
def test_off_policy_corrections_ignore_columns_without_log_prob(keys: dict[str, Any], level: TokenLevel) -> None:
    recompute = {} if "off_policy_masking_delta" in keys else {"old_logprob": "recompute"}
    assert_equal_with_empty_columns(logprob_type=level, entropy_type=level, **recompute, **keys)


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_cov_fraction_excludes_tokens_without_log_prob(loss_type: str, share: float) -> None:
    bounds = {"cov_bounds": [-9.0, 9.0]} if loss_type == "clip_cov" else {}
    assert_equal_with_empty_columns(loss_type=loss_type, cov_share=share, **bounds)


def test_reward_kl_ignores_columns_without_log_prob() -> None:
    """Otherwise kl_target would be compared with a KL that is too small."""
    episodes = [make_episode([[1.0] * K, [0.0] * K], episode_id=i, first_record=9 * i) for i in range(2)]
    own, other = np.random.default_rng(0).normal(size=(2, 2, 2, K * D)).astype(np.float32)
    cfg = algorithm_of(kl_beta=0.1, kl_in_reward=True, kl_target=0.1, kl_horizon=10)
    found = []
    for widen, scored in ((lambda array: array, 0), (lambda array: padded(torch.from_numpy(array)).numpy(), D)):
        algorithm = Algorithm(cfg, scored=scored)
        scores = EstimatorInputs(logprob=tuple(map(widen, own)), ref_logprob=tuple(map(widen, other)))
        batch = algorithm.prepare(episodes, scores)
        found.append((batch.advantage, batch.metrics["train/reward_kl"], algorithm.state()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("adv_type", [n for n in ADVANTAGES.names() if not ADVANTAGES.get(n).needs_replay])
@pytest.mark.parametrize("in_reward", [False, True])
def test_estimators_ignore_record_columns_without_logprob(adv_type: str, in_reward: bool) -> None:
    """Advantages, loss weights, loss, gradient and metrics; log-probabilities enter through a KL."""
    group = 2 if ADVANTAGES.get(adv_type).needs_groups else 1
    cfg = algorithm_of(adv_type=adv_type, group_size=group, kl_beta=0.1, kl_in_reward=in_reward)
    episodes = ragged_episodes(value_dim := Algorithm(cfg).value_dim(K))
    rng = np.random.default_rng(0)
    own, other = ([rng.normal(size=(len(e.valid), K * D)).astype(np.float32) for e in episodes] for _ in range(2))
    found = []
    for widen, scored in ((torch.clone, 0), (padded, D)):
        algorithm = Algorithm(cfg, scored=scored)
        wide = [tuple(widen(torch.from_numpy(part)).numpy() for part in parts) for parts in (own, other)]
        scores = EstimatorInputs(
            logprob=wide[0],
            ref_logprob=wide[1],
            states=tuple(np.arange(len(e.valid)) for e in episodes),
            greedy=tuple(replace(e, reward=0.5 * e.reward) for e in episodes),
        )
        batch = algorithm.prepare(episodes, scores)
        weights = algorithm.weights(batch, range(len(batch.records)))
        leaf, score = compute_scores(batch, value_dim)
        inputs = inputs_of(algorithm, batch, value_dim)
        assert inputs.ref_logprob is not None
        inputs = replace(inputs, old_logprob=widen(inputs.old_logprob), ref_logprob=widen(inputs.ref_logprob))
        wider = replace(score, logprob=widen(score.logprob), entropy=widen(score.entropy))
        loss, measured = algorithm.loss(wider, inputs)
        (gradient,) = torch.autograd.grad(loss, leaf)
        numbers = batch.metrics | merge_metrics(compute_metrics([measured]))
        found.append((batch.advantage, batch.returns, weights.policy, loss.detach(), gradient, numbers))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
