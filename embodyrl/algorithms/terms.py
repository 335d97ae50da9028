"""Additional loss terms: value loss and KL estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.algorithms.policy_losses import MAX_LOG_RATIO

if TYPE_CHECKING:
    import torch


MAX_KL = 10.0
"""Bound on a KL estimate, which limits the effect of a single improbable token on its batch."""


def value_loss(
    value: torch.Tensor,
    old_value: torch.Tensor,
    returns: torch.Tensor,
    *,
    clip: float | None,
    huber_delta: float | None,
) -> torch.Tensor:
    """Return the clipped value loss of each entry: the larger of the errors of the value and of the clipped value.

    The value is clipped around the old value. The error is e^2 / 2; with Huber loss, it is delta (|e| - delta / 2)
    where |e| > delta. All shapes are equal.
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
    """Estimate the KL as d = `gap`: unbiased, with a high variance and an expected gradient of 0."""
    return gap


def k2(gap: Any) -> Any:
    """Estimate the KL as d^2 / 2, with d = `gap`: biased, but with the expected gradient of the true KL."""
    return 0.5 * gap**2


def k3(gap: Any) -> Any:
    """Estimate the KL as exp(-d) + d - 1, with d = `gap`: unbiased, never negative, with a low variance.

    The result is at most `MAX_KL`.
    """
    gap = gap.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inverse_ratio = np.exp(-gap) if isinstance(gap, np.ndarray) else (-gap).exp()
    return (inverse_ratio + gap - 1.0).clip(-MAX_KL, MAX_KL)


def k3_with_gradient_of_k2(gap: torch.Tensor) -> torch.Tensor:
    """Estimate the KL with the value of k3 and the gradient of k2."""
    return k2(gap) + (k3(gap) - k2(gap)).detach()


KL_ESTIMATORS: dict[str, Callable[[Any], Any]] = {
    "k1": k1,
    "abs": abs,  # biased
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
    "k3+": k3_with_gradient_of_k2,
    "k3_unbiased": k3,
}
"""KL estimators by `kl_penalty_type`: KL(p || q) from d = log p - log q at samples of p.

All estimators work elementwise on torch tensors (for the loss) and, except k3+, on numpy arrays (for rewards). Source:
joschu.net/blog/kl-approx.html."""
IMPORTANCE_WEIGHTED = frozenset({"k3_unbiased"})
"""Names of KL estimators that are multiplied by the probability ratio new / old, with gradient (arXiv 2512.02556)."""


def kl(logprob: torch.Tensor, other_logprob: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || other) of each entry with the estimator `kind` of `KL_ESTIMATORS`."""
    return KL_ESTIMATORS[kind](logprob - other_logprob)
