"""Element-wise losses on torch tensors. Tensor methods only, so that declaring a loss needs no torch import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


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


def _low_var_kl(gap: torch.Tensor) -> torch.Tensor:
    gap = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((-gap).exp() + gap - 1.0).clamp(-MAX_KL, MAX_KL)


def _straight_through(gap: torch.Tensor) -> torch.Tensor:
    square = 0.5 * gap.square()
    return square + (_low_var_kl(gap) - square).detach()


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda gap: gap,
    "abs": lambda gap: gap.abs(),
    "k2": lambda gap: 0.5 * gap.square(),
    "low_var_kl": _low_var_kl,
    "k3": _low_var_kl,
    "k3+": _straight_through,
    "k3_unbiased": _low_var_kl,
}
"""Estimators of KL(p || q) from gap = log p - log q at samples of p (joschu.net/blog/kl-approx.html)."""
IMPORTANCE_WEIGHTED = frozenset({"k3_unbiased"})
"""Estimators that are multiplied by the probability ratio new / old, gradient included (arXiv 2512.02556)."""


def kl(logprob: torch.Tensor, other_logprob: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || other) per entry.

    k1 = d, abs = |d|, k2 = d^2 / 2, low_var_kl = k3 = exp(-d) + d - 1, with d = logprob - other; k3 clamps d to +-20
    and its value to +-10. k3+ has the value of k3 and the gradient of k2, which is that of the true KL.
    """
    return KL_ESTIMATORS[kind](logprob - other_logprob)
