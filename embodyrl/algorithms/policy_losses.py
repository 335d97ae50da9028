"""PPO clip loss, and functions shared by policy losses (`loss_type`), such as the weights of `loss_agg_func`.

A unit is a token, an action or a chunk that has one probability ratio (`logprob_type`). A sequence is an episode, or
the part of an episode in the optimizer step. Only executed actions count. Weights are computed over the whole optimizer
step, so that the losses of micro-batches add up to the loss of the step.

A is the advantage, r = pi / pi_old, d = log r; all losses are minimized. For sequence-level methods (gspo, gmpo), one
sample (a chunk of actions or a text response) is the sequence. Losses call tensor methods only, so that a module with
a loss does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import LossTerms, LossUnits, PolicyLoss
from embodyrl.algorithms.settings import AggregationMode, TokenLevel
from embodyrl.config.settings import Settings
from embodyrl.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    import torch


SUM_MODES = frozenset({"token-sum", "seq-mean-token-sum"})
"""Modes of `loss_agg_func` that sum over the tokens of an action instead of averaging."""


def select_scored_columns(values: Any, actions: int, scored: int) -> Any:
    """Select the token values that have a log-probability: [B, K * D] to [B, K * P] (torch or numpy).

    Records of flow and diffusion policies have more tokens than log-probabilities: only the first P tokens of each
    action have one.

    Args:
        values: [B, K * D].
        actions: K.
        scored: P, the value of `PolicySpec.scored`; 0: all tokens have a log-probability.
    """
    if not scored or values.shape[1] == actions * scored:
        return values
    return values.reshape(len(values), actions, -1)[:, :, :scored].reshape(len(values), actions * scored)


def to_units(token_values: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Sum token values [B, L] per token [B, K, D], action [B, K, 1] or chunk [B, 1, 1]; invalid actions count as 0."""
    batch, actions = valid.shape
    assert token_values.shape[1] % actions == 0, (token_values.shape, valid.shape)
    # `where` instead of a product, because log-probabilities of unexecuted actions may be NaN.
    grid = token_values.reshape(batch, actions, -1)
    grid = grid.where(valid[:, :, None], grid.new_zeros(()))
    # Skip the sum over a single token, because the call takes a noticeable time in small networks.
    if level == TokenLevel.token_level or (level == TokenLevel.action_level and grid.shape[2] == 1):
        return grid
    return grid.sum(2, keepdim=True) if level == TokenLevel.action_level else grid.sum((1, 2), keepdim=True)


def unit_mask(valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Return the mask of valid units, [B, K, 1] or [B, 1, 1]."""
    return valid.any(1)[:, None, None] if level == TokenLevel.chunk_level else valid[:, :, None]


def unit_advantage(advantage: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Reshape advantages [B, K] to [B, K, 1]; at chunk level, return their mean over executed actions, [B, 1, 1]."""
    if level != TokenLevel.chunk_level:
        return advantage[:, :, None]
    return ((advantage * valid).sum(1) / valid.sum(1))[:, None, None]


def weighted_token_mean(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Average over the tokens of each action or chunk, and return the weighted sum of the averages."""
    return compute_weighted_means(units, weight).sum()


def compute_weighted_means(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the token mean of each action [B, K] or chunk [B, 1], multiplied by the weight of the action or chunk."""
    row_weight = weight if units.shape[1] == weight.shape[1] else weight.sum(1, keepdim=True)
    return (units.squeeze(2) if units.shape[2] == 1 else units.mean(2)) * row_weight


def equal_weights(mask: BoolArray) -> FloatArray:
    """Return equal weights that sum to 1 for the entries in the mask, and 0 for all other entries."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def action_weights(
    mode: AggregationMode, episode: IntArray, valid: BoolArray, *, level: TokenLevel, longest_episode: int
) -> FloatArray:
    """Return the weight of each action in the loss of one optimizer step.

    With u units, S sequences and u_i units in sequence i, the weight of a unit is: token-mean 1/u; token-sum 1;
    seq-mean-token-sum 1/S; seq-mean-token-mean 1/(S u_i); seq-mean-token-sum-norm 1/(S X), where X is the number of
    units of an episode at its time limit (arXiv 2503.20783). At chunk level, the weight of a chunk is divided equally
    among its executed actions.

    Args:
        mode: `loss_agg_func`.
        episode: [B] episode of each sample.
        valid: [B, K] executed actions; at least one per sample.
        level: unit of the probability ratio.
        longest_episode: number of chunks of an episode at its time limit, for seq-mean-token-sum-norm.

    Returns:
        [B, K] float32, 0 where not valid.
    """
    assert valid.any(axis=1).all(), "a sample without an executed action"
    # float64, because a batch may contain millions of units and the weights must sum to 1.
    weights = valid.astype(np.float64)
    if level == TokenLevel.chunk_level:
        weights /= weights.sum(axis=1, keepdims=True)
    if mode == "token-mean":
        return (weights / weights.sum()).astype(np.float32)
    actions_per_chunk = 1 if level == TokenLevel.chunk_level else valid.shape[1]
    _, index = np.unique(episode, return_inverse=True)
    sequence_weights = np.bincount(index, weights=weights.sum(axis=1))
    sequences = len(sequence_weights)
    if mode == "seq-mean-token-sum":
        weights /= sequences
    elif mode == "seq-mean-token-mean":
        weights /= sequences * sequence_weights[index][:, None]
    elif mode == "seq-mean-token-sum-norm":
        weights /= sequences * longest_episode * actions_per_chunk
    else:
        assert mode == "token-sum", mode
    return weights.astype(np.float32)


MAX_LOG_RATIO = 20.0
"""Maximum absolute log ratio: exp overflows in fp32 at 88, and larger ratios are outside every clip range."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(d), where d = log pi - log pi_old is clipped to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class ClipSettings(Settings):
    """Clip range of the probability ratio in PPO."""

    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower PPO clip range: ratios are clipped at 1 - clip_ratio_low; 1: no lower bound."""
    clip_ratio_high: Annotated[float, Field(gt=0, le=10)] = 0.28
    """Upper PPO clip range: ratios are clipped at 1 + clip_ratio_high."""


class DualClipSettings(ClipSettings):
    """Clip range of the probability ratio in PPO, and constant of the dual clip."""

    clip_ratio_c: Annotated[float, Field(gt=1, le=10**9)] | None = None
    """Dual-clip constant c > 1, which limits the ratio for negative advantages; null: off."""


def compute_ratio(units: LossUnits) -> torch.Tensor:
    """Return the probability ratio of each unit."""
    return bounded_ratio(units.logprob - units.old_logprob)


def surrogate(advantage: torch.Tensor, ratio: torch.Tensor, cfg: ClipSettings) -> LossTerms:
    """Compute the clipped PPO surrogate of each unit, max(-A r, -A clip(r, 1 - low, 1 + high)).

    `clipped` marks units without a gradient.
    """
    negative_advantage = -advantage
    plain = negative_advantage * ratio
    bounded = negative_advantage * ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return LossTerms(loss=plain.maximum(bounded), ratio=ratio, clipped=bounded > plain)


def ppo_clip(units: LossUnits, cfg: DualClipSettings) -> LossTerms:
    """Compute the PPO clip loss (arXiv 1707.06347); high > low is clip-higher (arXiv 2503.14476).

    `clip_ratio_c` bounds the loss of negative advantages by -A c (dual clip, arXiv 1912.09729).
    """
    terms = surrogate(units.advantage, compute_ratio(units), cfg)
    if cfg.clip_ratio_c is None:
        return terms
    ceiling = (-units.advantage * cfg.clip_ratio_c).expand_as(terms.loss)
    capped = (units.advantage < 0) & (ceiling < terms.loss)
    return LossTerms(loss=ceiling.where(capped, terms.loss), ratio=terms.ratio, clipped=terms.clipped | capped)


PPO_CLIP = PolicyLoss(compute=ppo_clip, settings=DualClipSettings)
