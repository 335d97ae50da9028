"""Importance weights and masks for off-policy data, computed for the units [B, ...] of a policy loss.

Units are tokens, actions or chunks (see `policy_losses.py`). No gradient flows through the results.

log w = log pi_proximal - log pi_behavior, where pi_proximal is the policy at the start of the update and pi_behavior
is the policy that acted. Removed units still count in the denominator of the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodyrl.algorithms.policy_losses import bounded_ratio
from embodyrl.algorithms.settings import WeightLevel, WeightMode

if TYPE_CHECKING:
    import torch


def importance_weights(
    log_weight: torch.Tensor, valid: torch.Tensor, *, cap: float, mode: WeightMode, level: WeightLevel
) -> torch.Tensor:
    """Return importance weights w, with weights above `cap` set to 0 (mask) or to `cap` (truncate).

    Mode mask: decoupled PPO, arXiv 2505.24298. Mode truncate: truncated importance sampling (TIS).

    Args:
        log_weight: [B, ...] log w of each unit.
        valid: bool, same shape.
        cap: upper bound of w.
        mode: treatment of larger weights.
        level: one w per unit (token), or one w per sample: the product over its units (sequence), or the geometric mean
            of its units (geometric).
    """
    masked = log_weight.where(valid, log_weight.new_zeros(()))
    if level != WeightLevel.token:
        total = masked.flatten(1).sum(1)
        count = valid.flatten(1).sum(1) if level == WeightLevel.geometric else 1
        masked = (total / count).reshape(-1, *[1] * (masked.dim() - 1)).expand_as(masked)
    weight = bounded_ratio(masked)
    if mode == WeightMode.truncate:
        return weight.clamp(max=cap)
    return weight.where(weight <= cap, weight.new_zeros(()))


def second_moment_mask(log_weight: torch.Tensor, valid: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """Return a mask that drops units with the largest (log w)^2 until the mean of the rest is below the threshold.

    At least one unit is kept (M2PO, arXiv 2510.01161).

    Returns:
        bool, same shape.
    """
    squared, order = log_weight.square()[valid].sort(descending=True, stable=True)
    count = len(squared)
    # rest[i] is the mean of squared[i] and all smaller values. It decreases with i, so the units to drop come first.
    rest = squared.flip(0).cumsum(0).flip(0) / squared.new_ones(count).cumsum(0).flip(0)
    dropped = int((rest >= threshold).sum().clamp(max=count - 1))
    selected = valid.new_ones(count)
    selected[order[:dropped]] = False
    mask = valid.clone()
    mask[valid] = selected
    return mask


def off_policy_mask(log_ratio_mean: torch.Tensor, advantage: torch.Tensor, *, delta: float) -> torch.Tensor:
    """Return a mask that excludes off-policy samples with a negative advantage.

    A unit is dropped where A < 0 and the mean of log pi_behavior - log pi over its sequence exceeds delta.

    The paper (arXiv 2512.02556, 3.1) uses the probabilities of the sampling engine, so the mismatch between engine and
    trainer counts as off-policy too. Recomputed probabilities would hide that mismatch.

    Args:
        log_ratio_mean: [B, 1, 1] mean of log pi_behavior - log pi over the sequence.
        advantage: [B, K, 1] or [B, 1, 1].
        delta: bound of the mean.

    Returns:
        bool, shape of `advantage`.
    """
    return ~((advantage < 0) & (log_ratio_mean > delta))
