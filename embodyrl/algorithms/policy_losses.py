"""Policy losses (`loss_type`) of units, and the weight of each unit (`loss_agg_func`).

A unit has one probability ratio: a token, an action or a chunk (`logprob_type`). A sequence is an episode, or its part
within the optimizer step. Only executed actions count. The weights are linear and over the whole optimizer step, so
that the losses of micro-batches add up exactly.

A advantage, r = pi / pi_old, d = log r; all losses are minimised. For sequence-level methods (gspo, gmpo), one sample
(a chunk of actions or a text response) is the sequence. Tensor methods only, so that declaring a loss needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import LossTerms, PolicyLoss, Units
from embodyrl.algorithms.settings import RISING, AggregationMode, TokenLevel
from embodyrl.config.settings import Must, Positive, Settings, Weight
from embodyrl.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    import torch


SUM_MODES = frozenset({"token-sum", "seq-mean-token-sum"})
"""Modes of `loss_agg_func` that sum over the tokens of an action; the other modes average."""


def scored_columns(values: Any, actions: int, scored: int) -> Any:
    """Return the columns [B, K * P] of tokens [B, K * D] that have a log-probability (torch or numpy).

    Records of flow and diffusion policies have more tokens than log-probabilities: the first P of each action.

    Args:
        values: [B, K * D].
        actions: K.
        scored: P, as `PolicySpec.scored`; 0: all.
    """
    if not scored or values.shape[1] == actions * scored:
        return values
    return values.reshape(len(values), actions, -1)[:, :, :scored].reshape(len(values), actions * scored)


def to_units(token_values: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Sum tokens [B, L] to the given level: [B, K, D] tokens, [B, K, 1] actions, [B, 1, 1] chunks; 0 if not valid."""
    batch, actions = valid.shape
    assert token_values.shape[1] % actions == 0, (token_values.shape, valid.shape)
    # `where` instead of a product: log-probabilities of unexecuted actions may be NaN.
    grid = token_values.reshape(batch, actions, -1)
    grid = grid.where(valid[:, :, None], grid.new_zeros(()))
    # Skip the sum over a single token: the call is measurable in small networks.
    if level == TokenLevel.token_level or (level == TokenLevel.action_level and grid.shape[2] == 1):
        return grid
    return grid.sum(2, keepdim=True) if level == TokenLevel.action_level else grid.sum((1, 2), keepdim=True)


def unit_mask(valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Return the mask of valid units, [B, K, 1] or [B, 1, 1]."""
    return valid.any(1)[:, None, None] if level == TokenLevel.chunk_level else valid[:, :, None]


def unit_advantage(advantage: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Reshape advantages [B, K] to [B, K, 1], or to [B, 1, 1] at chunk level (executed actions share one value)."""
    if level != TokenLevel.chunk_level:
        return advantage[:, :, None]
    return ((advantage * valid).sum(1) / valid.sum(1))[:, None, None]


def mean_share(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over actions (or chunks) of the mean over their tokens."""
    return shares(units, weight).sum()


def shares(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean over the tokens of each action, [B, K], or chunk, [B, 1]."""
    per_row = weight if units.shape[1] == weight.shape[1] else weight.sum(1, keepdim=True)
    return (units.squeeze(2) if units.shape[2] == 1 else units.mean(2)) * per_row


def equal_shares(mask: BoolArray) -> FloatArray:
    """Return equal weights that sum to 1 under the mask, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def action_weights(
    mode: AggregationMode, episode: IntArray, valid: BoolArray, *, level: TokenLevel, longest_episode: int
) -> FloatArray:
    """Return the weight of each action in the loss of one optimizer step.

    With u units, S sequences and u_i units of sequence i, a unit weighs: token-mean 1/u; token-sum 1;
    seq-mean-token-sum 1/S; seq-mean-token-mean 1/(S u_i); seq-mean-token-sum-norm 1/(S X), where X is the number of
    units of an episode at its time limit (arXiv 2503.20783), a constant of the run. At chunk level the weight of a
    chunk is spread evenly over its executed actions.

    Args:
        mode: `loss_agg_func`.
        episode: [B] episode of each sample.
        valid: [B, K] executed actions; at least one per sample.
        level: unit of the probability ratio.
        longest_episode: chunks of an episode at its time limit, for seq-mean-token-sum-norm.

    Returns:
        [B, K] float32, 0 where not valid.
    """
    assert valid.any(axis=1).all(), "a sample without an executed action"
    # float64: a batch may contain millions of units, and the weights must sum to 1.
    unit = valid.astype(np.float64)
    if level == TokenLevel.chunk_level:
        unit /= unit.sum(axis=1, keepdims=True)
    if mode == "token-mean":
        return (unit / unit.sum()).astype(np.float32)
    per_chunk = 1 if level == TokenLevel.chunk_level else valid.shape[1]
    _, index = np.unique(episode, return_inverse=True)
    per_sequence = np.bincount(index, weights=unit.sum(axis=1))
    sequences = len(per_sequence)
    if mode == "seq-mean-token-sum":
        unit /= sequences
    elif mode == "seq-mean-token-mean":
        unit /= sequences * per_sequence[index][:, None]
    elif mode == "seq-mean-token-sum-norm":
        unit /= sequences * longest_episode * per_chunk
    else:
        assert mode == "token-sum", mode
    return unit.astype(np.float32)


MAX_LOG_RATIO = 20.0
"""Bound of log ratios: exp overflows fp32 at 88, and a larger ratio is outside every clip range."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(d), where d = log pi - log pi_old is clipped to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound of the mean log-ratio of a sequence (gspo)."""


class ClipSettings(Settings):
    """Settings of the clip range of the ratio."""

    clip_ratio_low: Annotated[float, Field(gt=0, le=100)] = 0.2
    """Distance of the lower PPO clip bound from 1; 1 or more: no lower bound, because ratios are positive."""
    clip_ratio_high: Positive = 0.28
    """Distance of the upper PPO clip bound from 1."""


class DualClipSettings(ClipSettings):
    """Settings of the clip range of the ratio, and of the bound of the loss."""

    clip_ratio_c: Annotated[float, Field(gt=1, le=10**9)] | None = None
    """Dual clip bound for negative advantages (> 1); null: off."""


class SapoSettings(Settings):
    """Settings of SAPO."""

    sapo_tau_pos: Positive = 1.0
    """sapo: temperature of the sigmoid for positive advantages."""
    sapo_tau_neg: Positive = 1.05
    """sapo: temperature of the sigmoid for negative advantages."""


class TruncatedRatioSettings(Settings):
    """Settings of truncated importance weights."""

    ratio_max: Positive = 2.0
    """aipo: upper bound of the importance weight."""


class LogRatioSettings(Settings):
    """Settings of the penalty on the log-ratio."""

    log_ratio_coef: Weight = 1.0
    """dro: weight of half the squared log-ratio; kl_cov: weight of the absolute log-ratio."""


class CovarianceSettings(Settings):
    """Settings of the selection of tokens with a large covariance."""

    cov_share: Annotated[float, Field(gt=0, le=1)] = 2.0e-4
    """clip_cov: fraction of tokens without gradient; kl_cov: fraction of tokens with the KL penalty."""


class ClipCovSettings(DualClipSettings, CovarianceSettings):
    """Settings of Clip-Cov."""

    cov_bounds: Annotated[list[float], RISING, Must("[low,high] with low < high")] = [1.0, 5.0]
    """clip_cov: [low, high] range of the covariance of advantage and log-probability; only tokens in this range are
    selected."""


class KlCovSettings(LogRatioSettings, CovarianceSettings):
    """Settings of KL-Cov."""


def _log_ratio(u: Units) -> torch.Tensor:
    return (u.logprob - u.old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(u: Units) -> torch.Tensor:
    return bounded_ratio(u.logprob - u.old_logprob)


def _surrogate(advantage: torch.Tensor, ratio: torch.Tensor, cfg: ClipSettings) -> LossTerms:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)); `clipped` marks entries without a gradient."""
    slope = -advantage
    plain = slope * ratio
    bounded = slope * ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return LossTerms(loss=plain.maximum(bounded), ratio=ratio, clipped=bounded > plain)


def _unclipped(loss: torch.Tensor, ratio: torch.Tensor) -> LossTerms:
    # All False, with the device and shape of the ratio.
    return LossTerms(loss=loss, ratio=ratio, clipped=ratio != ratio)


def ppo_clip(u: Units, cfg: DualClipSettings) -> LossTerms:
    """Clip the ratio as in PPO (arXiv 1707.06347); high > low is clip-higher (2503.14476).

    `clip_ratio_c` bounds the loss of negative advantages by -A c (dual clip, 1912.09729).
    """
    terms = _surrogate(u.advantage, _ratio(u), cfg)
    if cfg.clip_ratio_c is None:
        return terms
    ceiling = (-u.advantage * cfg.clip_ratio_c).expand_as(terms.loss)
    capped = (u.advantage < 0) & (ceiling < terms.loss)
    return LossTerms(loss=ceiling.where(capped, terms.loss), ratio=terms.ratio, clipped=terms.clipped | capped)


def gspo(u: Units, cfg: ClipSettings) -> LossTerms:
    """Clip the sequence ratio exp(mean d), which all units of the sequence share (arXiv 2507.18071)."""
    # Only an upper bound is needed: for very small values, exp is 0.
    ratio = u.mean(_log_ratio(u)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    return _surrogate(u.advantage, ratio.expand_as(u.logprob), cfg)


def gmpo(u: Units, cfg: ClipSettings) -> LossTerms:
    """Compute -A exp(mean k), k = s min(s d, s clip(d, -low, high)), s = sign A: geometric mean (arXiv 2507.20673)."""
    log_ratio, sign = _log_ratio(u), u.advantage.sign()
    inside = log_ratio.clamp(-cfg.clip_ratio_low, cfg.clip_ratio_high)
    kept = sign * (sign * log_ratio).minimum(sign * inside)
    ratio = u.mean(kept).exp().expand_as(log_ratio)
    return LossTerms(loss=-u.mean(u.advantage) * ratio, ratio=ratio, clipped=kept != log_ratio)


def sapo(u: Units, cfg: SapoSettings) -> LossTerms:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft clip (arXiv 2511.20347)."""
    ratio = _ratio(u)
    tau = ratio.new_tensor(cfg.sapo_tau_pos).where(u.advantage > 0, ratio.new_tensor(cfg.sapo_tau_neg))
    return _unclipped(-u.advantage * 4.0 / tau * (tau * (ratio - 1.0)).sigmoid(), ratio)


def _weighted_likelihood(u: Units, weight: torch.Tensor) -> torch.Tensor:
    """Compute -sg(weight) A log pi: every unit keeps a gradient."""
    return -weight.detach() * u.advantage * u.logprob


def cispo(u: Units, cfg: ClipSettings) -> LossTerms:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A log pi (arXiv 2506.13585)."""
    ratio = _ratio(u)
    weight = ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return _unclipped(_weighted_likelihood(u, weight), ratio)


def pg(u: Units, _: Settings) -> LossTerms:
    """Compute -A log pi: the plain policy gradient, for on-policy data."""
    ratio = _ratio(u)
    return _unclipped(_weighted_likelihood(u, ratio.new_ones(())), ratio)


def aipo(u: Units, cfg: TruncatedRatioSettings) -> LossTerms:
    """Compute -sg(min(r, ratio_max)) A log pi (arXiv 2505.24034); with rollout log-probabilities: TIS-REINFORCE."""
    ratio = _ratio(u)
    return _unclipped(_weighted_likelihood(u, ratio.clamp(max=cfg.ratio_max)), ratio)


def aipo_ratio(u: Units, cfg: TruncatedRatioSettings) -> LossTerms:
    """Compute -min(r, ratio_max) A: the gradient flows through the ratio below the bound."""
    ratio = _ratio(u)
    return LossTerms(loss=-ratio.clamp(max=cfg.ratio_max) * u.advantage, ratio=ratio, clipped=ratio > cfg.ratio_max)


def topr(u: Units, _: Settings) -> LossTerms:
    """Compute -A log pi where A > 0, else -sg(clip(r, 0, 1)) A log pi (arXiv 2503.14286)."""
    ratio = _ratio(u)
    return _unclipped(_weighted_likelihood(u, ratio.new_ones(()).where(u.advantage > 0, ratio.clamp(max=1.0))), ratio)


def dro(u: Units, cfg: LogRatioSettings) -> LossTerms:
    """Compute -A log pi + log_ratio_coef / 2 d^2: DRO (arXiv 2405.19107) and Kimi k1.5 (2501.12599)."""
    log_ratio = _log_ratio(u)
    likelihood = _weighted_likelihood(u, log_ratio.new_ones(()))
    return _unclipped(likelihood + 0.5 * cfg.log_ratio_coef * log_ratio.square(), log_ratio.exp())


def _covariance(u: Units) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A - mean A)(log pi - mean log pi) of each unit without gradient, and the mask of valid units."""
    mask = u.valid.expand_as(u.logprob)
    logprob, advantage = u.logprob.detach(), u.advantage.expand_as(u.logprob)
    return (advantage - advantage[mask].mean()) * (logprob - logprob[mask].mean()), mask


def clip_cov(u: Units, cfg: ClipCovSettings) -> LossTerms:
    """Remove the gradient of a random `cov_share` of the units with a covariance in `cov_bounds` (arXiv 2505.22617).

    The remaining loss is the PPO clip. The selection uses torch's generator, which the run seeds and checkpoints;
    covariances are those of the micro-batch.
    """
    import torch

    terms = ppo_clip(u, cfg)
    covariance, mask = _covariance(u)
    low, high = cfg.cov_bounds
    # Units that PPO has clipped already are not candidates.
    able = torch.nonzero(((covariance > low) & (covariance < high) & mask & ~terms.clipped).flatten()).flatten()
    drop = torch.zeros_like(mask).flatten()
    drop[able[torch.randperm(len(able))[: max(1, int(cfg.cov_share * int(mask.sum())))]]] = True
    drop = drop.reshape(mask.shape)
    return LossTerms(loss=terms.loss.where(~drop, 0.0), ratio=terms.ratio, clipped=terms.clipped | drop)


def kl_cov(u: Units, cfg: KlCovSettings) -> LossTerms:
    """Compute -A r, plus log_ratio_coef |d| on the `cov_share` of units with the largest covariance (arXiv 2505.22617).

    Covariances are those of the micro-batch.
    """
    log_ratio = _log_ratio(u)
    covariance, mask = _covariance(u)
    count = max(1, int(cfg.cov_share * int(mask.sum())))
    # Select by index: where all advantages are equal, all units of a micro-batch have the same covariance.
    largest = covariance.masked_fill(~mask, -float("inf")).flatten().topk(count).indices
    chosen = mask.new_zeros(mask.numel()).index_fill(0, largest, True)
    penalty = (cfg.log_ratio_coef * log_ratio.abs()).where(chosen.reshape(mask.shape), 0.0)
    return _unclipped(-u.advantage * log_ratio.exp() + penalty, log_ratio.exp())


PPO_CLIP = PolicyLoss(compute=ppo_clip, settings=DualClipSettings)
GSPO = PolicyLoss(compute=gspo, settings=ClipSettings)
GMPO = PolicyLoss(compute=gmpo, settings=ClipSettings)
SAPO = PolicyLoss(compute=sapo, settings=SapoSettings)
CISPO = PolicyLoss(compute=cispo, settings=ClipSettings)
PG = PolicyLoss(compute=pg)
AIPO = PolicyLoss(compute=aipo, settings=TruncatedRatioSettings)
AIPO_RATIO = PolicyLoss(compute=aipo_ratio, settings=TruncatedRatioSettings)
TOPR = PolicyLoss(compute=topr)
DRO = PolicyLoss(compute=dro, settings=LogRatioSettings, needs_all_samples=True)
CLIP_COV = PolicyLoss(compute=clip_cov, settings=ClipCovSettings, needs_all_samples=True)
KL_COV = PolicyLoss(compute=kl_cov, settings=KlCovSettings, needs_all_samples=True)
