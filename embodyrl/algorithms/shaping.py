"""From an environment's rewards to those that are credited: scale, clip, normalisation, KL to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embodyrl.algorithms.advantages import grpo
from embodyrl.algorithms.losses import KL_ESTIMATORS, MAX_LOG_RATIO
from embodyrl.algorithms.protocol import Scores
from embodyrl.algorithms.settings import AlgorithmSettings, RewardNorm, TruncatedEpisodes
from embodyrl.types import Episode


def shape_rewards(episodes: Sequence[Episode], cfg: AlgorithmSettings) -> list[Episode]:
    """Return the episodes with the rewards that estimators see.

    Per action r = reward_scale r; then, on the last executed action, what changes the outcome R = sum r: the bias,
    0 for truncated episodes where asked for, the clip, and the normalisation over the batch or group.
    """
    outcome = np.array([_outcome(episode, cfg) for episode in episodes])
    if cfg.reward_norm != RewardNorm.none and episodes:
        groups = [e.spec.group_id if cfg.reward_norm == RewardNorm.group else 0 for e in episodes]
        outcome = grpo(outcome, groups)
    if cfg.reward_scale == 1.0 and outcome.tolist() == [episode.episode_return for episode in episodes]:
        return list(episodes)
    return [_with_outcome(episode, float(r), cfg) for episode, r in zip(episodes, outcome, strict=True)]


def _outcome(episode: Episode, cfg: AlgorithmSettings) -> float:
    if episode.truncated and not episode.cut and cfg.truncated_episodes == TruncatedEpisodes.zero_reward:
        return 0.0
    total = (episode.episode_return + cfg.reward_bias) * cfg.reward_scale
    if cfg.reward_clip is not None:
        total = float(np.clip(total, -cfg.reward_clip, cfg.reward_clip))
    return total


def _with_outcome(episode: Episode, outcome: float, cfg: AlgorithmSettings) -> Episode:
    reward = np.where(episode.valid, episode.reward * cfg.reward_scale, 0.0).astype(np.float32)
    last = np.flatnonzero(episode.valid)[-1:]
    reward.flat[last] += outcome - reward.sum()
    return replace(episode, reward=reward)


def subtract_kl(episodes: Sequence[Episode], scores: Scores, *, beta: float, kind: str) -> tuple[list[Episode], float]:
    """Return the episodes with r - beta KL(old || ref) per action, and the mean KL of a token."""
    pairs = []
    for episode, own, other in zip(episodes, scores.logprob, scores.ref_logprob, strict=True):
        gap = np.clip(own - other, -MAX_LOG_RATIO, MAX_LOG_RATIO).reshape(*episode.valid.shape, -1)
        gap = np.where(episode.valid[:, :, None], gap, 0.0).astype(np.float32)
        pairs.append((episode, KL_ESTIMATORS[kind](gap)))
    shaped = [replace(e, reward=(e.reward - beta * one.sum(2)).astype(np.float32)) for e, one in pairs]
    tokens = sum(int(e.valid.sum()) * one.shape[2] for e, one in pairs)
    return shaped, float(sum(one.sum(dtype=np.float64) for _, one in pairs) / max(tokens, 1))


def adapted_beta(beta: float, kl: float, *, target: float, samples: int, horizon: int) -> float:
    """Beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon), the adaptive controller of arXiv 1909.08593."""
    return beta * (1.0 + float(np.clip(kl / target - 1.0, -0.2, 0.2)) * samples / horizon)
