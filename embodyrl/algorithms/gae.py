"""`adv_type: gae`: a value head predicts the return of each chunk (V = 1) or of each action (V = K)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodyrl.algorithms.advantages import Float64, gae, whiten
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit
from embodyrl.config.schema import AlgorithmConfig, RewardLevel
from embodyrl.types import BoolArray, Episode


def gae_credits(episodes: Sequence[Episode], cfg: AlgorithmConfig) -> list[Credit]:
    """Estimate advantages per credited step, whitened over the batch where `normalize_advantages` asks for it."""
    chunk_level = cfg.reward_type == RewardLevel.chunk_level
    pairs = [_one_episode(episode, cfg, chunk_level) for episode in episodes]
    masks = [_credited(episode, chunk_level) for episode in episodes]
    advantages = [advantage for advantage, _ in pairs]
    if cfg.normalize_advantages and episodes:
        flat = whiten(np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)]))
        ends = np.cumsum([int(m.sum()) for m in masks])
        for advantage, mask, part in zip(advantages, masks, np.split(flat, ends[:-1]), strict=True):
            advantage[mask] = part
    return [
        Credit(
            advantage=np.where(episode.valid, advantage, 0.0).astype(np.float32),
            returns=returns.astype(np.float32),
        )
        for episode, advantage, (_, returns) in zip(episodes, advantages, pairs, strict=True)
    ]


def _credited(episode: Episode, chunk_level: bool) -> BoolArray:
    """Return the mask [T, V] of credited steps: chunks that ran at all, or executed actions."""
    return np.asarray(episode.valid.any(axis=1, keepdims=True)) if chunk_level else episode.valid


def _one_episode(episode: Episode, cfg: AlgorithmConfig, chunk_level: bool) -> tuple[Float64, Float64]:
    """Advantages and returns [T, V]."""
    reward = np.where(episode.valid, episode.reward, 0.0).astype(np.float64)
    if chunk_level:
        reward = reward.sum(axis=1, keepdims=True)
    assert episode.value.shape == reward.shape, f"value {episode.value.shape} against rewards {reward.shape}"
    advantage, returns = gae(
        reward.ravel(),
        episode.value.ravel(),
        0.0 if episode.terminated else float(episode.bootstrap_value[0]),
        _credited(episode, chunk_level).ravel(),
        gamma=cfg.gamma,
        lam=cfg.gae_lambda,
    )
    return advantage.reshape(reward.shape), returns.reshape(reward.shape)


GAE = AdvantageEstimator(
    compute=gae_credits,
    consumes=frozenset({"gamma", "gae_lambda", "reward_type", "normalize_advantages"}),
    needs_groups=False,
    needs_values=True,
    counts_chunk_steps=True,
)
