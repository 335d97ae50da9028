"""Advantage estimators GRPO and GAE (`adv_type`), and functions shared by other estimators; computed in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, EstimatorInputs
from embodyrl.algorithms.settings import (
    CreditSettings,
    DiscountSettings,
    GroupSettings,
    NormalizeSettings,
    RewardLevel,
    ValueSettings,
)
from embodyrl.config.settings import Share
from embodyrl.types import BoolArray, DoubleArray, Episode, FloatArray

G = TypeVar("G", bound=GroupSettings)


def apply_by_group(
    compute: Callable[..., npt.ArrayLike], group: npt.ArrayLike, reward: npt.ArrayLike, *more_values: npt.ArrayLike
) -> DoubleArray:
    """Apply `compute` to the rewards of each group; return one result per episode, [E].

    Arrays [E] in `more_values` are passed to `compute` like the rewards. Groups of one, or with equal rewards, get 0.
    """
    group, columns = np.asarray(group), [np.asarray(column, dtype=np.float64) for column in (reward, *more_values)]
    assert all(column.shape == group.shape for column in columns)
    out = np.zeros(group.shape)
    for group_id in np.unique(group):
        member = group == group_id
        if np.ptp(columns[0][member]) > 0:  # rounding of the mean must not turn equal rewards into a tiny advantage
            out[member] = compute(*(column[member] for column in columns))
    return out


def grpo(
    reward: npt.ArrayLike, group: npt.ArrayLike, *, normalize: bool = True, unbiased: bool = True, eps: float = 1e-6
) -> DoubleArray:
    """Compute GRPO advantages (R - mean_g) / (std_g + eps) per group (arXiv 2402.03300); 0 for a group of one.

    Args:
        reward: [E] outcome rewards.
        group: [E] group ids.
        normalize: divide by the group's standard deviation; False is Dr.GRPO (arXiv 2503.20783).
        unbiased: standard deviation with ddof 1, else 0.
        eps: added to the standard deviation.

    Returns:
        [E] advantages.
    """

    def standardize(rewards: DoubleArray) -> DoubleArray:
        scale = rewards.std(ddof=int(unbiased)) + eps if normalize else 1.0
        return (rewards - rewards.mean()) / scale

    return apply_by_group(standardize, group, reward)


def whiten(values: npt.ArrayLike, *, eps: float = 1e-8) -> DoubleArray:
    """Normalize values to mean 0 and variance 1: (x - mean) / sqrt(var + eps), with the unbiased variance (ddof=1).

    Fewer than two values, or equal values, become 0.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + eps)


class StdSettings(GroupSettings, NormalizeSettings):
    """Settings of estimators that divide by the standard deviation of a group."""

    keys_by_condition = {"normalize_advantages": "std_unbiased"}

    std_unbiased: bool = True
    """Use n - 1 instead of n in the denominator of a group's standard deviation."""


def get_returns(episodes: Sequence[Episode]) -> list[float]:
    """Return the undiscounted return of each episode, [E]."""
    return [episode.episode_return for episode in episodes]


def get_groups(episodes: Sequence[Episode]) -> list[int]:
    """Return the group id of each episode, [E]."""
    return [episode.spec.group_id for episode in episodes]


def build_outcome_estimator(
    compute: Callable[[Sequence[Episode], EstimatorInputs, G], DoubleArray], settings: type[G]
) -> AdvantageEstimator[G]:
    """Build an estimator in which all actions of an episode have the same advantage.

    `compute` returns the advantage of each episode, [E].
    """

    def compute_credits(episodes: Sequence[Episode], inputs: EstimatorInputs, cfg: G) -> list[Credit]:
        advantages = compute(episodes, inputs, cfg)
        return [broadcast_advantage(episode, own) for episode, own in zip(episodes, advantages, strict=True)]

    return AdvantageEstimator(compute=compute_credits, settings=settings)


def broadcast_advantage(episode: Episode, advantage: float | DoubleArray) -> Credit:
    """Build the credit of an episode from its advantage (scalar, [T, 1] or [T, K]), without value targets."""
    masked = np.where(episode.valid, advantage, 0.0).astype(np.float32)
    return Credit(advantage=masked, returns=np.zeros((len(masked), 0), np.float32))


def compute_grpo_advantages(episodes: Sequence[Episode], _: EstimatorInputs, cfg: StdSettings) -> DoubleArray:
    """Return the GRPO advantage of each episode (see `grpo`)."""
    returns, groups = get_returns(episodes), get_groups(episodes)
    return grpo(returns, groups, normalize=cfg.normalize_advantages, unbiased=cfg.std_unbiased)


GRPO = build_outcome_estimator(compute_grpo_advantages, StdSettings)


def gae(
    reward: npt.ArrayLike,
    value: npt.ArrayLike,
    bootstrap: npt.ArrayLike,
    valid: npt.ArrayLike,
    *,
    gamma: float,
    lam: float,
    ends: npt.ArrayLike | None = None,
) -> tuple[DoubleArray, DoubleArray]:
    """Compute generalized advantage estimates (arXiv 1506.02438); invalid entries are skipped.

    Formulas: delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V.

    Args:
        reward: [T] reward of each credited step.
        value: [T] value estimate before each step.
        bootstrap: [E] value after the last valid step: 0 if the episode terminated, or the estimate for its final
            observation if the episode was truncated or interrupted.
        valid: [T] bool, the step was executed.
        gamma: discount per credited step.
        lam: GAE lambda.
        ends: [E] end index of each of several concatenated episodes; None: all entries are one episode.

    Returns:
        advantages [T] and returns [T]; 0 where not valid.
    """
    reward, value = np.asarray(reward, dtype=np.float64), np.asarray(value, dtype=np.float64)
    valid = np.asarray(valid, dtype=bool)
    # Positions count valid steps only. An episode without valid steps is dropped.
    steps, ends = np.flatnonzero(valid), np.asarray([len(reward)] if ends is None else ends)
    stops = np.concatenate([[0], valid.cumsum()])[ends]
    lengths = np.diff(stops, prepend=0)
    longest = np.argsort(-lengths, kind="stable")
    index, next_value, lengths = stops[longest] - 1, np.ravel(bootstrap)[longest], lengths[longest]
    result, running = np.zeros(len(steps)), np.zeros(len(longest))
    r, v = reward[steps], value[steps]
    # Process all episodes together, from the last step backwards; completely processed episodes are at the end.
    for count in range(lengths.max(initial=0)):
        num_longer = np.count_nonzero(lengths > count)
        index, next_value, running = index[:num_longer], next_value[:num_longer], running[:num_longer]
        result[index] = running = r[index] + gamma * next_value - v[index] + gamma * lam * running
        next_value, index = v[index], index - 1
    advantage, returns = np.zeros_like(reward), np.zeros_like(reward)
    advantage[steps] = result
    returns[steps] = advantage[steps] + value[steps]
    return advantage, returns


class GaeSettings(ValueSettings, DiscountSettings, NormalizeSettings):
    """Settings of generalized advantage estimation."""

    keys_by_condition = {"normalize_advantages": "normalize_per_task"}

    normalize_returns: bool = False
    """Divide rewards by the running standard deviation of discounted returns; returns in metrics are not divided."""
    gae_lambda: Share = 1.0
    """GAE lambda, from 0 (one-step TD error) to 1 (Monte Carlo return)."""
    normalize_per_task: bool = False
    """Whiten advantages per task instead of over the whole batch, so that tasks with small rewards also contribute."""


def compute_gae_credits(episodes: Sequence[Episode], _: EstimatorInputs, cfg: GaeSettings) -> list[Credit]:
    """Compute GAE advantages and value targets, with one value per chunk (V = 1) or per action (V = K)."""
    valid, reward, value = (
        np.concatenate(part)
        for part in zip(*((episode.valid, episode.reward, episode.value) for episode in episodes), strict=True)
    )
    credited_mask, reward = select_credited_steps(valid, cfg), sum_rewards(valid, reward, cfg)
    assert value.shape == reward.shape, f"value {value.shape} against rewards {reward.shape}"
    ends = np.cumsum([len(episode.valid) for episode in episodes])
    bootstrap = [0.0 if episode.terminated else float(episode.bootstrap_value[0]) for episode in episodes]
    advantage, returns = (
        result.reshape(reward.shape)
        for result in gae(
            reward.ravel(),
            value.ravel(),
            bootstrap,
            credited_mask.ravel(),
            gamma=cfg.gamma,
            lam=cfg.gae_lambda,
            # `gae` receives K entries per chunk at action level, else 1.
            ends=ends * reward.shape[1],
        )
    )
    if cfg.normalize_advantages:
        # Whiten after the value targets are computed, because targets keep the scale of the reward.
        tasks = [episode.spec.task_id if cfg.normalize_per_task else 0 for episode in episodes]
        task_by_row = np.repeat(tasks, np.diff(ends, prepend=0))
        for task in set(tasks):
            mask = credited_mask & (task_by_row == task)[:, None]
            advantage[mask] = whiten(advantage[mask])
    advantage, returns = np.where(valid, advantage, 0.0).astype(np.float32), returns.astype(np.float32)
    starts = [0, *ends.tolist()]
    return [Credit(advantage=advantage[a:b], returns=returns[a:b]) for a, b in pairwise(starts)]


def sum_rewards(valid: BoolArray, reward: FloatArray, cfg: CreditSettings) -> DoubleArray:
    """Return the rewards of chunks [T, 1] or of actions [T, K], depending on `reward_type`."""
    valid_rewards = np.where(valid, reward, 0.0).astype(np.float64)
    return valid_rewards.sum(axis=1, keepdims=True) if cfg.reward_type == RewardLevel.chunk_level else valid_rewards


def select_credited_steps(valid: BoolArray, cfg: CreditSettings) -> BoolArray:
    """Return the mask of steps that receive an advantage, depending on `reward_type`.

    The mask [T, 1] selects chunks with at least one executed action; the mask [T, K] selects executed actions.
    """
    if cfg.reward_type == RewardLevel.chunk_level:
        return np.asarray(valid.any(axis=1, keepdims=True))
    return valid


GAE = AdvantageEstimator(compute=compute_gae_credits, settings=GaeSettings, counts_chunk_steps=True)
