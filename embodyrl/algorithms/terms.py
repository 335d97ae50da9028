"""Additional loss terms: value, KL, preference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.algorithms.policy_losses import MAX_LOG_RATIO

if TYPE_CHECKING:
    import torch


MAX_KL = 10.0
"""Bound of a sampled KL, which limits the effect of one improbable token on its batch."""


def value_loss(
    value: torch.Tensor,
    old_value: torch.Tensor,
    returns: torch.Tensor,
    *,
    clip: float | None,
    huber_delta: float | None,
) -> torch.Tensor:
    """Return half the squared (or Huber) error of the value or of the clipped value, whichever is larger.

    1/2 e^2 where |e| <= delta, else delta (|e| - delta / 2); shapes are equal. The value is clipped around the old
    value.
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


def k1(gap: Any) -> Any:
    """Return `gap` d: an unbiased estimate with a large variance, whose expected gradient is 0."""
    return gap


def absolute(gap: Any) -> Any:
    """Return the absolute value |d| of `gap` d: a biased estimate."""
    return abs(gap)


def k2(gap: Any) -> Any:
    """Return d^2 / 2 of `gap` d: a biased estimate whose expected gradient equals that of the true KL."""
    return 0.5 * gap**2


def k3(gap: Any) -> Any:
    """Return exp(-d) + d - 1 within +-`MAX_KL`: unbiased, never negative, with a low variance."""
    gap = gap.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inverse_ratio = np.exp(-gap) if isinstance(gap, np.ndarray) else (-gap).exp()
    return (inverse_ratio + gap - 1.0).clip(-MAX_KL, MAX_KL)


def k3_with_gradient_of_k2(gap: torch.Tensor) -> torch.Tensor:
    """Return the value of k3 with the gradient of k2."""
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
"""KL estimators by `kl_penalty_type`: KL(p || q) from d = log p - log q at samples of p.

They work elementwise on torch tensors (for the loss) or numpy arrays (for rewards; k3+ has no use there). Source:
joschu.net/blog/kl-approx.html."""
IMPORTANCE_WEIGHTED = frozenset({"k3_unbiased"})
"""Estimators multiplied by the probability ratio new / old, with gradient (arXiv 2512.02556)."""


def kl(logprob: torch.Tensor, other_logprob: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || other) per entry, with one of `KL_ESTIMATORS`."""
    return KL_ESTIMATORS[kind](logprob - other_logprob)
