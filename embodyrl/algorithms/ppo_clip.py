"""`loss_type: ppo_clip`: clipped surrogate with separate bounds and an optional dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodyrl.algorithms.losses import ppo_clip
from embodyrl.algorithms.protocol import LossTerms, PolicyLoss
from embodyrl.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    import torch


def ppo_clip_terms(
    logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, cfg: AlgorithmConfig
) -> LossTerms:
    """Apply `losses.ppo_clip` with the bounds of the config."""
    loss, ratio, clipped = ppo_clip(
        logprob,
        old_logprob,
        advantage,
        low=cfg.clip_ratio_low,
        high=cfg.clip_ratio_high,
        dual=cfg.clip_ratio_c,
    )
    return LossTerms(loss=loss, ratio=ratio, clipped=clipped)


PPO_CLIP = PolicyLoss(compute=ppo_clip_terms, consumes=frozenset({"clip_ratio_low", "clip_ratio_high", "clip_ratio_c"}))
