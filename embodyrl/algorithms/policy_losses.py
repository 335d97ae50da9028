"""Policy losses, which `loss_type` names, of units, and what each unit counts (`loss_agg_func`).

A unit is what carries one probability ratio: a token, an action or a chunk (`logprob_type`). A sequence is an episode,
or the part of it that falls into the optimizer step. Only executed actions count. The weights are linear and over the
whole optimizer step, so that the losses of micro-batches add up exactly.

A advantage, r = pi / pi_old, d = log r; all losses are minimised. Sequence-level methods (gspo, gmpo) take one sample,
a chunk of actions or a text response, for the sequence. Tensor methods only, so that declaring a loss needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import LossTerms, PolicyLoss, Units
from embodyrl.algorithms.settings import RISING, AggregationMode, TokenLevel
from embodyrl.config.settings import Positive, Says, Settings, Weight
from embodyrl.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    import torch


SUM_MODES = frozenset({"token-sum", "seq-mean-token-sum"})
"""Modes of `loss_agg_func` that add the tokens of an action; the others average them."""


def scored_columns(values: Any, actions: int, scored: int) -> Any:
    """Return the columns [B, K * P] of tokens [B, K * D] that carry a log-probability, torch or numpy.

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
    # `where` and not a product: log-probabilities of actions that never ran may be anything, NaN included.
    grid = token_values.reshape(batch, actions, -1)
    grid = grid.where(valid[:, :, None], grid.new_zeros(()))
    # Small networks feel every operation: a sum over one token is spared.
    if level == TokenLevel.token_level or (level == TokenLevel.action_level and grid.shape[2] == 1):
        return grid
    return grid.sum(2, keepdim=True) if level == TokenLevel.action_level else grid.sum((1, 2), keepdim=True)


def unit_mask(valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Valid units [B, K, 1] or [B, 1, 1]."""
    return valid.any(1)[:, None, None] if level == TokenLevel.chunk_level else valid[:, :, None]


def unit_advantage(advantage: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Advantage [B, K] as [B, K, 1], or [B, 1, 1] at chunk level, where the executed actions share one value."""
    if level != TokenLevel.chunk_level:
        return advantage[:, :, None]
    return ((advantage * valid).sum(1) / valid.sum(1))[:, None, None]


def mean_share(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted sum over actions (or chunks) of the mean over the tokens of each."""
    return shares(units, weight).sum()


def shares(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, K] or [B, 1]"""
    per_row = weight if units.shape[1] == weight.shape[1] else weight.sum(1, keepdim=True)
    return (units.squeeze(2) if units.shape[2] == 1 else units.mean(2)) * per_row


def equal_shares(mask: BoolArray) -> FloatArray:
    """Equal weights that sum to 1 where the mask holds, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def action_weights(
    mode: AggregationMode, episode: IntArray, valid: BoolArray, *, level: TokenLevel, longest_episode: int
) -> FloatArray:
    """Weight of each action in the loss of one optimizer step.

    With u units, S sequences and u_i units of sequence i, a unit weighs: token-mean 1/u; token-sum 1;
    seq-mean-token-sum 1/S; seq-mean-token-mean 1/(S u_i); seq-mean-token-sum-norm 1/(S X), X the units of an
    episode that its time limit ends (arXiv 2503.20783), a constant of the run. At chunk level the weight of a chunk is
    spread evenly over its executed actions.

    Args:
        mode: `loss_agg_func`.
        episode: [B] episode of each sample.
        valid: [B, K] executed actions; at least one per sample.
        level: what a unit is.
        longest_episode: chunks of an episode that its time limit ends, for seq-mean-token-sum-norm.

    Returns:
        [B, K] float32, 0 where not valid.
    """
    assert valid.any(axis=1).all(), "a sample without an executed action"
    # In double precision: a batch may hold millions of units, and the weights have to sum to 1.
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
"""exp overflows fp32 at 88; beyond this bound a sample is far outside every clip range anyway."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) with d = log pi - log pi_old within +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound of the mean log-ratio of a sequence (gspo)."""


class ClipSettings(Settings):
    """Bounds of the ratio."""

    clip_ratio_low: Annotated[float, Field(gt=0, le=100)] = 0.2
    """PPO clip below 1; from 1 on there is no lower bound, for ratios are not below 0."""
    clip_ratio_high: Positive = 0.28
    """PPO clip above 1."""


class DualClipSettings(ClipSettings):
    """Bounds of the ratio and of the loss."""

    clip_ratio_c: Annotated[float, Field(gt=1, le=10**9)] | None = None
    """Dual clip bound for negative advantages (> 1); null: off."""


class SapoSettings(Settings):
    """Gates of SAPO."""

    sapo_tau_pos: Positive = 1.0
    """sapo: steepness of the gate for positive advantages."""
    sapo_tau_neg: Positive = 1.05
    """sapo: steepness of the gate for the others."""


class TruncatedRatioSettings(Settings):
    """Truncated importance weights."""

    ratio_max: Positive = 2.0
    """aipo: upper bound of the importance weight."""


class LogRatioSettings(Settings):
    """A penalty on the log-ratio."""

    log_ratio_coef: Weight = 1.0
    """dro: weight of half the squared log-ratio; kl_cov: of its absolute value."""


class CovarianceSettings(Settings):
    """Tokens of large covariance."""

    cov_share: Annotated[float, Field(gt=0, le=1)] = 2.0e-4
    """clip_cov, kl_cov: share of the tokens that is held back."""


class ClipCovSettings(DualClipSettings, CovarianceSettings):
    """Clip-Cov."""

    cov_bounds: Annotated[list[float], RISING, Says("[low,high] with low < high")] = [1.0, 5.0]
    """clip_cov: [low, high] covariance of advantage and log-probability of the tokens to choose from."""


class KlCovSettings(LogRatioSettings, CovarianceSettings):
    """KL-Cov."""


def _log_ratio(u: Units) -> torch.Tensor:
    return (u.logprob - u.old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(u: Units) -> torch.Tensor:
    return bounded_ratio(u.logprob - u.old_logprob)


def _surrogate(advantage: torch.Tensor, ratio: torch.Tensor, cfg: ClipSettings) -> LossTerms:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); `clipped` marks entries without a gradient."""
    slope = -advantage
    plain = slope * ratio
    bounded = slope * ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return LossTerms(loss=plain.maximum(bounded), ratio=ratio, clipped=bounded > plain)


def _unclipped(loss: torch.Tensor, ratio: torch.Tensor) -> LossTerms:
    # All False, on the ratio's device and in its shape.
    return LossTerms(loss=loss, ratio=ratio, clipped=ratio != ratio)


def ppo_clip(u: Units, cfg: DualClipSettings) -> LossTerms:
    """PPO (arXiv 1707.06347); high > low is clip-higher (2503.14476).

    `clip_ratio_c` bounds the loss of negative advantages by -A c (dual clip, 1912.09729).
    """
    terms = _surrogate(u.advantage, _ratio(u), cfg)
    if cfg.clip_ratio_c is None:
        return terms
    ceiling = (-u.advantage * cfg.clip_ratio_c).expand_as(terms.loss)
    capped = (u.advantage < 0) & (ceiling < terms.loss)
    return LossTerms(loss=ceiling.where(capped, terms.loss), ratio=terms.ratio, clipped=terms.clipped | capped)


def gspo(u: Units, cfg: ClipSettings) -> LossTerms:
    """PPO clip on the sequence ratio exp(mean d), shared by all units of the sequence (arXiv 2507.18071)."""
    # Bounded upwards only: far below, exp is 0 and does no harm.
    ratio = u.mean(_log_ratio(u)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    return _surrogate(u.advantage, ratio.expand_as(u.logprob), cfg)


def gmpo(u: Units, cfg: ClipSettings) -> LossTerms:
    """-A exp(mean k), k = s min(s d, s clip(d, -low, high)), s = sign A: geometric mean (arXiv 2507.20673)."""
    log_ratio, sign = _log_ratio(u), u.advantage.sign()
    inside = log_ratio.clamp(-cfg.clip_ratio_low, cfg.clip_ratio_high)
    kept = sign * (sign * log_ratio).minimum(sign * inside)
    ratio = u.mean(kept).exp().expand_as(log_ratio)
    return LossTerms(loss=-u.mean(u.advantage) * ratio, ratio=ratio, clipped=kept != log_ratio)


def sapo(u: Units, cfg: SapoSettings) -> LossTerms:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft gate instead of a clip (arXiv 2511.20347)."""
    ratio = _ratio(u)
    tau = ratio.new_tensor(cfg.sapo_tau_pos).where(u.advantage > 0, ratio.new_tensor(cfg.sapo_tau_neg))
    return _unclipped(-u.advantage * 4.0 / tau * (tau * (ratio - 1.0)).sigmoid(), ratio)


def _weighted_likelihood(u: Units, weight: torch.Tensor) -> torch.Tensor:
    """-sg(weight) A log pi: every unit keeps a gradient."""
    return -weight.detach() * u.advantage * u.logprob


def cispo(u: Units, cfg: ClipSettings) -> LossTerms:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (arXiv 2506.13585)."""
    ratio = _ratio(u)
    weight = ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return _unclipped(_weighted_likelihood(u, weight), ratio)


def pg(u: Units, _: Settings) -> LossTerms:
    """-A log pi: the plain policy gradient, for on-policy data."""
    ratio = _ratio(u)
    return _unclipped(_weighted_likelihood(u, ratio.new_ones(())), ratio)


def aipo(u: Units, cfg: TruncatedRatioSettings) -> LossTerms:
    """-sg(min(r, ratio_max)) A log pi (arXiv 2505.24034); against rollout log-probabilities this is TIS-REINFORCE."""
    ratio = _ratio(u)
    return _unclipped(_weighted_likelihood(u, ratio.clamp(max=cfg.ratio_max)), ratio)


def aipo_ratio(u: Units, cfg: TruncatedRatioSettings) -> LossTerms:
    """-min(r, ratio_max) A: the form with a gradient through the ratio, none above the bound."""
    ratio = _ratio(u)
    return LossTerms(loss=-ratio.clamp(max=cfg.ratio_max) * u.advantage, ratio=ratio, clipped=ratio > cfg.ratio_max)


def topr(u: Units, _: Settings) -> LossTerms:
    """A > 0: -A log pi; A <= 0: -sg(clip(r, 0, 1)) A log pi (arXiv 2503.14286)."""
    ratio = _ratio(u)
    return _unclipped(_weighted_likelihood(u, ratio.new_ones(()).where(u.advantage > 0, ratio.clamp(max=1.0))), ratio)


def dro(u: Units, cfg: LogRatioSettings) -> LossTerms:
    """-A log pi + log_ratio_coef / 2 d^2: DRO (arXiv 2405.19107) and Kimi k1.5 (2501.12599)."""
    log_ratio = _log_ratio(u)
    likelihood = _weighted_likelihood(u, log_ratio.new_ones(()))
    return _unclipped(likelihood + 0.5 * cfg.log_ratio_coef * log_ratio.square(), log_ratio.exp())


def _covariance(u: Units) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A - mean A)(log pi - mean log pi) of each unit without gradient, and the mask of valid units."""
    mask = u.valid.expand_as(u.logprob)
    logprob, advantage = u.logprob.detach(), u.advantage.expand_as(u.logprob)
    return (advantage - advantage[mask].mean()) * (logprob - logprob[mask].mean()), mask


def clip_cov(u: Units, cfg: ClipCovSettings) -> LossTerms:
    """PPO clip; a random `cov_share` of the units with a covariance in `cov_bounds` loses its gradient (2505.22617).

    The choice follows torch's generator, which the run seeds and checkpoints; the statistics are the micro-batch's.
    """
    import torch

    terms = ppo_clip(u, cfg)
    covariance, mask = _covariance(u)
    low, high = cfg.cov_bounds
    # What the clip has silenced already is no choice.
    able = torch.nonzero(((covariance > low) & (covariance < high) & mask & ~terms.clipped).flatten()).flatten()
    drop = torch.zeros_like(mask).flatten()
    drop[able[torch.randperm(len(able))[: max(1, int(cfg.cov_share * int(mask.sum())))]]] = True
    drop = drop.reshape(mask.shape)
    return LossTerms(loss=terms.loss.where(~drop, 0.0), ratio=terms.ratio, clipped=terms.clipped | drop)


def kl_cov(u: Units, cfg: KlCovSettings) -> LossTerms:
    """-A r, plus log_ratio_coef |d| on the `cov_share` of units with the largest covariance (arXiv 2505.22617).

    The statistics are the micro-batch's.
    """
    log_ratio = _log_ratio(u)
    covariance, mask = _covariance(u)
    count = max(1, int(cfg.cov_share * int(mask.sum())))
    # By index: every unit of a micro-batch whose advantages are equal has the same covariance.
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
