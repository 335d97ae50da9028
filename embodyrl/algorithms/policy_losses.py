"""Policy losses, which `loss_type` names, and the other terms of a loss: value, KL, preference.

Tensor methods only, so that declaring a loss needs no torch import.

A advantage, r = pi / pi_old, d = log r; all losses are minimised. Sequence-level methods (gspo, gmpo) take one sample,
a chunk of actions or a text response, for the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import LossTerms, PolicyLoss, Units
from embodyrl.algorithms.settings import RISING, AlgorithmSettings, ValueSettings
from embodyrl.config.settings import Positive, Says, Settings, Weight

if TYPE_CHECKING:
    import torch


MAX_LOG_RATIO = 20.0
"""exp overflows fp32 at 88; beyond this bound a sample is far outside every clip range anyway."""
MAX_KL = 10.0
"""Bound of a sampled KL, so that one improbable token cannot outweigh its batch."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) with d = log pi - log pi_old within +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def value_loss(
    value: torch.Tensor,
    old_value: torch.Tensor,
    returns: torch.Tensor,
    *,
    clip: float | None,
    huber_delta: float | None,
) -> torch.Tensor:
    """Half squared error, or Huber, of the worse of the value and the value clipped around the old one.

    1/2 e^2 where |e| <= delta, else delta (|e| - delta / 2); shapes are equal.
    """

    def error(estimate: torch.Tensor) -> torch.Tensor:
        gap = estimate - returns
        square = 0.5 * gap.square()
        if huber_delta is None:
            return square
        return square.where(gap.abs() <= huber_delta, huber_delta * (gap.abs() - 0.5 * huber_delta))

    plain = error(value)
    if clip is None:
        return plain
    return plain.maximum(error(old_value + (value - old_value).clamp(-clip, clip)))


def preference_loss(better: torch.Tensor, worse: torch.Tensor, *, smoothing: float = 0.0) -> torch.Tensor:
    """-(1 - s) log sigmoid(d) - s log sigmoid(-d), d = better - worse [B]: Bradley and Terry (1952).

    Of scores it trains a reward model; of beta (log pi - log pi_ref), summed over an answer's tokens, it is DPO (arXiv
    2305.18290), with smoothing s the conservative form.
    """
    gap = better - worse
    # -log sigmoid(x) = log(1 + exp(-x)), which must not overflow.
    return (-gap).clamp(min=0) + (-gap.abs()).exp().log1p() + smoothing * gap


def k1(gap: Any) -> Any:
    """d: unbiased, of large variance; its expected gradient is 0."""
    return gap


def absolute(gap: Any) -> Any:
    """|d|"""
    return abs(gap)


def k2(gap: Any) -> Any:
    """d^2 / 2: biased, but its gradient is that of the true KL."""
    return 0.5 * gap**2


def k3(gap: Any) -> Any:
    """exp(-d) + d - 1 within +-`MAX_KL`: unbiased, never negative, of low variance."""
    gap = gap.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inverse_ratio = np.exp(-gap) if isinstance(gap, np.ndarray) else (-gap).exp()
    return (inverse_ratio + gap - 1.0).clip(-MAX_KL, MAX_KL)


def k3_with_gradient_of_k2(gap: torch.Tensor) -> torch.Tensor:
    """The value of k3 and the gradient of k2."""
    return k2(gap) + (k3(gap) - k2(gap)).detach()


KL_ESTIMATORS: dict[str, Callable[[Any], Any]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
    "k3+": k3_with_gradient_of_k2,
    "k3_unbiased": k3,
}
"""By `kl_penalty_type`: estimators of KL(p || q) from d = log p - log q at samples of p.

They work on each entry of a torch tensor (for the loss) or of a numpy array (for rewards, but for k3+, which is all
gradient). Source: joschu.net/blog/kl-approx.html.
"""
IMPORTANCE_WEIGHTED = frozenset({"k3_unbiased"})
"""Estimators that are multiplied by the probability ratio new / old, gradient included (arXiv 2512.02556)."""


def kl(logprob: torch.Tensor, other_logprob: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || other) per entry, by one of `KL_ESTIMATORS`."""
    return KL_ESTIMATORS[kind](logprob - other_logprob)


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


def ppo_closed(xp: Any, log_ratio: Any, advantage: Any, cfg: DualClipSettings) -> tuple[Any, Any, Any, Any]:
    """`ppo_clip`, and d(-A r) / d log r = -A r, or 0 where a bound holds, be it of r, of the loss or of log r."""
    ratio, pull = xp.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)), -advantage
    plain, bounded = pull * ratio, pull * ratio.clip(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    loss, clipped = xp.maximum(plain, bounded), bounded > plain
    if cfg.clip_ratio_c is not None:
        ceiling = pull * cfg.clip_ratio_c
        capped = (advantage < 0) & (ceiling < loss)
        loss, clipped = xp.where(capped, ceiling, loss), clipped | capped
    return loss, ratio, clipped, plain * ~(clipped | (abs(log_ratio) > MAX_LOG_RATIO))


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


def has_slopes(cfg: AlgorithmSettings, loss: PolicyLoss) -> bool:
    """Whether a config's loss has no terms but those whose derivatives `slopes.py` knows."""
    others = cfg.kl_beta or cfg.positive_nll_coef or cfg.off_policy_masking_delta is not None
    if isinstance(cfg, ValueSettings):
        others = others or cfg.value_clip is not None or cfg.huber_delta is not None
    return loss.closed is not None and not others


PPO_CLIP = PolicyLoss(compute=ppo_clip, settings=DualClipSettings, closed=ppo_closed)
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
