"""Reward shaping before advantage estimation: scale, clip, normalization, KL to the reference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from embodyrl.algorithms.estimators import grpo
from embodyrl.algorithms.policy_losses import MAX_LOG_RATIO, select_scored_columns
from embodyrl.algorithms.protocol import EstimatorInputs
from embodyrl.algorithms.settings import AlgorithmSettings, RewardNorm, TruncatedEpisodes
from embodyrl.algorithms.terms import KL_ESTIMATORS
from embodyrl.types import DoubleArray, Episode, EpisodeSpec


def shape_rewards(episodes: Sequence[Episode], cfg: AlgorithmSettings) -> list[Episode]:
    """Return the episodes with shaped rewards for the estimators.

    First, each action's reward is multiplied by reward_scale. Then the reward of the last executed action is changed so
    that the sum of rewards is the outcome after bias, zero_reward, clip and normalization over the batch or group.
    """
    outcome = np.array([_compute_outcome(episode, cfg) for episode in episodes])
    if cfg.reward_norm != RewardNorm.none and episodes:
        groups = [e.spec.group_id if cfg.reward_norm == RewardNorm.group else 0 for e in episodes]
        outcome = grpo(outcome, groups)
    # Common case: return the same arrays, without copies or rounding.
    if cfg.reward_scale == 1.0 and outcome.tolist() == [episode.episode_return for episode in episodes]:
        return list(episodes)
    return [_replace_outcome(episode, float(r), cfg) for episode, r in zip(episodes, outcome, strict=True)]


def _compute_outcome(episode: Episode, cfg: AlgorithmSettings) -> float:
    if episode.truncated and not episode.cut and cfg.truncated_episodes == TruncatedEpisodes.zero_reward:
        return 0.0
    # Episodes interrupted at the end of a step have no outcome yet, so no bias is added.
    total = (episode.episode_return + (0.0 if episode.cut else cfg.reward_bias)) * cfg.reward_scale
    if cfg.reward_clip is not None:
        total = float(np.clip(total, -cfg.reward_clip, cfg.reward_clip))
    return total


def _replace_outcome(episode: Episode, outcome: float, cfg: AlgorithmSettings) -> Episode:
    reward = np.where(episode.valid, episode.reward * cfg.reward_scale, 0.0).astype(np.float32)
    last = np.flatnonzero(episode.valid)[-1:]
    # Change the reward of the last executed action so that the sum is the outcome; skip episodes without an action.
    reward.flat[last] += outcome - reward.sum()
    return replace(episode, reward=reward)


def subtract_kl(
    episodes: Sequence[Episode], inputs: EstimatorInputs, *, beta: float, kind: str, scored: int = 0
) -> tuple[list[Episode], float]:
    """Return the episodes with rewards r - beta KL(old || ref) per action, and the mean KL per token.

    `scored` is the value of `PolicySpec.scored`: the number of log-probabilities per action.
    """
    pairs = []
    for episode, own, other in zip(episodes, inputs.logprob, inputs.ref_logprob, strict=True):
        gap = select_scored_columns(own - other, episode.valid.shape[1], scored)
        gap = np.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO).reshape(*episode.valid.shape, -1)
        gap = np.where(episode.valid[:, :, None], gap, 0.0).astype(np.float32)
        pairs.append((episode, KL_ESTIMATORS[kind](gap)))
    shaped = [replace(e, reward=(e.reward - beta * one.sum(2)).astype(np.float32)) for e, one in pairs]
    tokens = sum(int(e.valid.sum()) * one.shape[2] for e, one in pairs)
    return shaped, float(sum(one.sum(dtype=np.float64) for _, one in pairs) / max(tokens, 1))


def adapt_beta(beta: float, kl: float, *, target: float, samples: int, horizon: int) -> float:
    """Return the adapted beta: beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon) (arXiv 1909.08593)."""
    return beta * (1.0 + float(np.clip(kl / target - 1.0, -0.2, 0.2)) * samples / horizon)


class ReturnScale:
    """Reward scaling by the running standard deviation of discounted returns (arXiv 1811.02553, appendix A).

    The return is the forward sum r_t + gamma r_(t-1) + ... of each episode, across training steps.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._count, self._mean, self._sum_of_squares = 0.0, 0.0, 0.0
        self._partial_returns: dict[EpisodeSpec, float] = {}
        """Partial returns of interrupted episodes that continue in the next training step, by episode spec."""

    def apply(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Update the statistics from the rewards of the episodes, and return the episodes with scaled rewards."""
        sums: list[float] = []
        previous, self._partial_returns = self._partial_returns, {}
        for episode in episodes:
            first_spec = episode.summary.spec
            partial_return = self._partial_returns.get(first_spec, previous.get(first_spec, 0.0))
            total = partial_return if episode.earlier else 0.0
            for reward in episode.reward[episode.valid].tolist():
                total = self._gamma * total + reward
                sums.append(total)
            if episode.cut:
                self._partial_returns[first_spec] = total
        self._update(np.asarray(sums))
        scale = np.float32(1.0 / math.sqrt(self._sum_of_squares / max(self._count, 1.0) + 1e-8))
        return [replace(e, reward=np.clip(e.reward * scale, -10.0, 10.0)) for e in episodes]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        partial_returns = [[asdict(spec), total] for spec, total in self._partial_returns.items()]
        return {
            "returns_count": self._count,
            "returns_mean": self._mean,
            "returns_spread": self._sum_of_squares,
            "returns_cut": partial_returns,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state`; statistics that the state lacks start empty."""
        # A resumed run restarts all episodes; a repeated step continues the interrupted episodes.
        self._partial_returns = {EpisodeSpec(**spec): total for spec, total in state.get("returns_cut", ())}
        self._count, self._mean, self._sum_of_squares = (
            state.get(f"returns_{name}", 0.0) for name in ("count", "mean", "spread")
        )

    def _update(self, values: DoubleArray) -> None:
        if not values.size:
            return
        # Merge the moments of two samples (Chan et al., 1979), with sums of squared deviations from the mean.
        total = self._count + values.size
        delta = float(values.mean()) - self._mean
        self._sum_of_squares += float(values.var()) * values.size + delta**2 * self._count * values.size / total
        self._mean += delta * values.size / total
        self._count = total


def filter_groups(
    episodes: Sequence[Episode], *, success: Sequence[float] | None, returns: Sequence[float] | None
) -> list[int]:
    """Return the indices of episodes whose group has a mean success and a mean return within the bounds."""
    groups: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.spec.group_id].append(episode)
    selected = {
        group
        for group, members in groups.items()
        if _is_within(success, [float(e.success_once) for e in members])
        and _is_within(returns, [float(e.reward[e.valid].sum()) for e in members])
    }
    return [i for i, episode in enumerate(episodes) if episode.spec.group_id in selected]


def _is_within(bounds: Sequence[float] | None, values: Sequence[float]) -> bool:
    return bounds is None or bounds[0] <= float(np.mean(values)) <= bounds[1]


TaskOutcomes = dict[str, list[float]]
"""Decayed counts [successes, episodes] by task id or reset id."""
