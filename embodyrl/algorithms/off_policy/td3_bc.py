"""TD3+BC: critics train a deterministic policy, and a supervised term imitates the actions of successful episodes.

The paper (Fujimoto and Gu, arXiv 2106.06860) imitates all actions of a fixed data set. Here, rollouts fill the replay
buffer, and only episodes with a high return are imitated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodyrl.algorithms.off_policy.estimator import CriticSettings, compute_sac_credits
from embodyrl.algorithms.off_policy.filtered_bc import SelectionSettings
from embodyrl.algorithms.protocol import AdvantageEstimator
from embodyrl.config.settings import Share, Weight

if TYPE_CHECKING:
    from torch import Tensor

NOISE_CLIP = 2.5
"""Maximum target noise, in standard deviations (as in TD3: 0.5 / 0.2)."""


class Td3BcSettings(CriticSettings, SelectionSettings):
    """Config keys of TD3+BC."""

    keys_by_condition = {
        "never: algorithm=td3_bc adds demonstrations to the successful episodes": "demonstration_share",
    }
    bc_weight: Weight = 20.0
    """Weight of the mean absolute error to the actions of successful episodes; the weight of Q / mean |Q| is 1. If it
    is too small, errors of Q dominate the updates of the policy."""
    success_share: Share = 0.9
    """Fraction of successful episodes in batches of the policy; batches of the critics have one half."""
    target_noise: Weight = 0.1
    """Standard deviation of the clipped noise on the next action in the target of the critics (TD3), in normalized
    actions."""


def smooth_actions(action: Tensor, normal: Tensor, std: float) -> Tensor:
    """Return actions [B, L] within -1..1 with clipped noise (TD3, arXiv 1802.09477); `normal` [B, L]: N(0, 1)."""
    return (action + std * normal.clamp(-NOISE_CLIP, NOISE_CLIP)).clamp(-1.0, 1.0)


def policy_loss(
    value: Tensor, scale: Tensor, action: Tensor, target: Tensor, imitated: Tensor, bc_weight: float
) -> Tensor:
    """Return the losses [B]: -Q(s, pi(s)) / scale, plus w |pi(s) - a| if the recorded action a is imitated.

    Args:
        value: [B] Q values of the policy's actions.
        scale: mean |Q| (equation 3 of the paper, with w = 1 / alpha).
        action: [B, L] actions of the policy.
        target: [B, L] recorded actions a.
        imitated: [B] 1 for actions of successful episodes, else 0.
        bc_weight: w.
    """
    return -value / scale + bc_weight * imitated * (action - target).abs().mean(1)


TD3_BC = AdvantageEstimator(
    compute=compute_sac_credits,
    settings=Td3BcSettings,
    learner="embodyrl.learners.off_policy.td3_bc_learner:Td3BcLearner",
    check="embodyrl.plan.off_policy:replay_problems",
)
