"""The other terms of a loss: value, KL, preference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.algorithms.policy_losses import MAX_LOG_RATIO

if TYPE_CHECKING:
    import torch


MAX_KL = 10.0
"""Bound of a sampled KL, so that one improbable token cannot outweigh its batch."""


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
    from torch.nn import functional

    def error(estimate: torch.Tensor) -> torch.Tensor:
        if huber_delta is None:
            return 0.5 * functional.mse_loss(estimate, returns, reduction="none")
        return functional.huber_loss(estimate, returns, reduction="none", delta=huber_delta)

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
