"""Policy losses other than `ppo_clip`; see `algorithms/policy_losses.py` for the notation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from embodyrl.algorithms.policy_losses import (
    MAX_LOG_RATIO,
    ClipSettings,
    DualClipSettings,
    compute_ratio,
    ppo_clip,
    surrogate,
)
from embodyrl.algorithms.protocol import LossTerms, LossUnits, PolicyLoss
from embodyrl.algorithms.settings import ASCENDING
from embodyrl.config.settings import Constraint, Positive, Settings, Weight

if TYPE_CHECKING:
    import torch


MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper bound of the mean log-ratio of a sequence (gspo)."""


class SapoSettings(Settings):
    """Settings of the loss `sapo` (soft adaptive policy optimization)."""

    sapo_tau_pos: Positive = 1.0
    """With loss_type=sapo: temperature of the sigmoid for positive advantages."""
    sapo_tau_neg: Positive = 1.05
    """With loss_type=sapo: temperature of the sigmoid for negative advantages."""


class TruncatedRatioSettings(Settings):
    """Settings of losses with truncated importance weights (`aipo`, `aipo_ratio`)."""

    ratio_max: Positive = 2.0
    """With loss_type=aipo or aipo_ratio: upper bound of the importance weight."""


class LogRatioSettings(Settings):
    """Settings of losses with a penalty on the log-ratio (`dro`, `kl_cov`)."""

    log_ratio_coef: Weight = 1.0
    """Weight of the penalty: with loss_type=dro, half the squared log-ratio; with kl_cov, the absolute log-ratio."""


class CovarianceSettings(Settings):
    """Settings of losses that select tokens by the covariance of advantage and log-probability."""

    cov_share: Annotated[float, Field(gt=0, le=1)] = 2.0e-4
    """Fraction of tokens without a gradient (loss_type=clip_cov) or with the KL penalty (kl_cov)."""


class ClipCovSettings(DualClipSettings, CovarianceSettings):
    """Settings of the loss `clip_cov`."""

    cov_bounds: Annotated[list[float], ASCENDING, Constraint("[low,high] with low < high")] = [1.0, 5.0]
    """With loss_type=clip_cov: [low, high] range of the covariance of advantage and log-probability in
    which tokens can be selected."""


class KlCovSettings(LogRatioSettings, CovarianceSettings):
    """Settings of the loss `kl_cov`."""


def _compute_log_ratio(units: LossUnits) -> torch.Tensor:
    return (units.logprob - units.old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _build_unclipped_terms(loss: torch.Tensor, ratio: torch.Tensor) -> LossTerms:
    # `ratio != ratio` is a mask of False with the device and shape of the ratio.
    return LossTerms(loss=loss, ratio=ratio, clipped=ratio != ratio)


def gspo(units: LossUnits, cfg: ClipSettings) -> LossTerms:
    """Compute the GSPO loss (arXiv 2507.18071): PPO clipping with one ratio exp(mean d) per sequence."""
    # Only an upper bound is needed, because exp of very small values is 0.
    ratio = units.mean(_compute_log_ratio(units)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    return surrogate(units.advantage, ratio.expand_as(units.logprob), cfg)


def gmpo(units: LossUnits, cfg: ClipSettings) -> LossTerms:
    """Compute the GMPO loss (arXiv 2507.20673) with the geometric mean of the clipped ratios of a sequence.

    The loss is -A exp(mean k) with k = s min(s d, s clip(d, -low, high)) and s = sign A.
    """
    log_ratio, sign = _compute_log_ratio(units), units.advantage.sign()
    clipped_ratio = log_ratio.clamp(-cfg.clip_ratio_low, cfg.clip_ratio_high)
    bounded = sign * (sign * log_ratio).minimum(sign * clipped_ratio)
    ratio = units.mean(bounded).exp().expand_as(log_ratio)
    return LossTerms(loss=-units.mean(units.advantage) * ratio, ratio=ratio, clipped=bounded != log_ratio)


def sapo(units: LossUnits, cfg: SapoSettings) -> LossTerms:
    """Compute the SAPO loss (arXiv 2511.20347), a soft clip: -A (4 / tau) sigmoid(tau (r - 1)).

    The temperature tau depends on the sign of A.
    """
    ratio = compute_ratio(units)
    tau = ratio.new_tensor(cfg.sapo_tau_pos).where(units.advantage > 0, ratio.new_tensor(cfg.sapo_tau_neg))
    return _build_unclipped_terms(-units.advantage * 4.0 / tau * (tau * (ratio - 1.0)).sigmoid(), ratio)


def _compute_weighted_likelihood(units: LossUnits, weight: torch.Tensor) -> torch.Tensor:
    """Return -sg(weight) A log pi, where sg stops the gradient.

    Units with a clipped weight still have a gradient.
    """
    return -weight.detach() * units.advantage * units.logprob


def cispo(units: LossUnits, cfg: ClipSettings) -> LossTerms:
    """Compute the CISPO loss (arXiv 2506.13585): -sg(clip(r, 1 - low, 1 + high)) A log pi."""
    ratio = compute_ratio(units)
    weight = ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return _build_unclipped_terms(_compute_weighted_likelihood(units, weight), ratio)


def pg(units: LossUnits, _: Settings) -> LossTerms:
    """Compute the plain policy-gradient loss -A log pi, for on-policy data."""
    ratio = compute_ratio(units)
    return _build_unclipped_terms(_compute_weighted_likelihood(units, ratio.new_ones(())), ratio)


def aipo(units: LossUnits, cfg: TruncatedRatioSettings) -> LossTerms:
    """Compute the AIPO loss (arXiv 2505.24034): -sg(min(r, ratio_max)) A log pi.

    With rollout log-probabilities, this is REINFORCE with truncated importance sampling (TIS).
    """
    ratio = compute_ratio(units)
    return _build_unclipped_terms(_compute_weighted_likelihood(units, ratio.clamp(max=cfg.ratio_max)), ratio)


def aipo_ratio(units: LossUnits, cfg: TruncatedRatioSettings) -> LossTerms:
    """Compute the loss -min(r, ratio_max) A, which has no gradient where the ratio exceeds `ratio_max`."""
    ratio = compute_ratio(units)
    return LossTerms(loss=-ratio.clamp(max=cfg.ratio_max) * units.advantage, ratio=ratio, clipped=ratio > cfg.ratio_max)


def topr(units: LossUnits, _: Settings) -> LossTerms:
    """Compute the TOPR loss (arXiv 2503.14286): -A log pi if A > 0, else -sg(clip(r, 0, 1)) A log pi."""
    ratio = compute_ratio(units)
    return _build_unclipped_terms(
        _compute_weighted_likelihood(units, ratio.new_ones(()).where(units.advantage > 0, ratio.clamp(max=1.0))), ratio
    )


def dro(units: LossUnits, cfg: LogRatioSettings) -> LossTerms:
    """Compute the DRO loss -A log pi + log_ratio_coef / 2 d^2 (arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599)."""
    log_ratio = _compute_log_ratio(units)
    likelihood = _compute_weighted_likelihood(units, log_ratio.new_ones(()))
    return _build_unclipped_terms(likelihood + 0.5 * cfg.log_ratio_coef * log_ratio.square(), log_ratio.exp())


def _compute_covariance(units: LossUnits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A - mean A)(log pi - mean log pi) of each unit, detached, and the mask of valid units."""
    mask = units.valid.expand_as(units.logprob)
    logprob, advantage = units.logprob.detach(), units.advantage.expand_as(units.logprob)
    return (advantage - advantage[mask].mean()) * (logprob - logprob[mask].mean()), mask


def clip_cov(units: LossUnits, cfg: ClipCovSettings) -> LossTerms:
    """Compute the Clip-Cov loss (arXiv 2505.22617): PPO clipping, with no gradient for some high-covariance units.

    These units are a random fraction `cov_share` of all units; their covariance is in `cov_bounds`. The selection uses
    torch's generator, which the run seeds and checkpoints. Covariances are computed in each micro-batch.
    """
    import torch

    terms = ppo_clip(units, cfg)
    covariance, mask = _compute_covariance(units)
    low, high = cfg.cov_bounds
    # Units that PPO has clipped already are not candidates.
    candidates = torch.nonzero(((covariance > low) & (covariance < high) & mask & ~terms.clipped).flatten()).flatten()
    drop = torch.zeros_like(mask).flatten()
    drop[candidates[torch.randperm(len(candidates))[: max(1, int(cfg.cov_share * int(mask.sum())))]]] = True
    drop = drop.reshape(mask.shape)
    return LossTerms(loss=terms.loss.where(~drop, 0.0), ratio=terms.ratio, clipped=terms.clipped | drop)


def kl_cov(units: LossUnits, cfg: KlCovSettings) -> LossTerms:
    """Compute the KL-Cov loss (arXiv 2505.22617): -A r, plus log_ratio_coef |d| for units of high covariance.

    The penalty applies to the fraction `cov_share` of units with the largest covariance. Covariances are computed in
    each micro-batch.
    """
    log_ratio = _compute_log_ratio(units)
    covariance, mask = _compute_covariance(units)
    count = max(1, int(cfg.cov_share * int(mask.sum())))
    # Select by index: where all advantages are equal, all units of a micro-batch have the same covariance.
    largest = covariance.masked_fill(~mask, -float("inf")).flatten().topk(count).indices
    selected = mask.new_zeros(mask.numel()).index_fill(0, largest, True)
    penalty = (cfg.log_ratio_coef * log_ratio.abs()).where(selected.reshape(mask.shape), 0.0)
    return _build_unclipped_terms(-units.advantage * log_ratio.exp() + penalty, log_ratio.exp())


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
