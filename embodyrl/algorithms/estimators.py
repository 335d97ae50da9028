"""Advantage estimators (`adv_type`) with a credit for each chunk or action (`reward_type`), computed in float64."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from embodyrl.algorithms.outcomes import StdSettings, grpo, spread, whiten
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import (
    CreditSettings,
    DiscountSettings,
    GroupSettings,
    NormalizeSettings,
    RewardLevel,
    ValueSettings,
)
from embodyrl.algorithms.shaping import shape_rewards
from embodyrl.config.settings import Positive, Share
from embodyrl.types import BoolArray, DoubleArray, Episode, FloatArray


def discounted(reward: npt.ArrayLike, valid: npt.ArrayLike, *, gamma: float) -> DoubleArray:
    """Return the discounted return-to-go of one episode [T]: sum over s >= t of gamma^(s-t) r_s.

    Invalid steps are skipped.
    """
    reward = np.asarray(reward, dtype=np.float64)
    return gae(reward, np.zeros_like(reward), 0.0, valid, gamma=gamma, lam=1.0)[0]


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
    """Compute generalised advantage estimates (arXiv 1506.02438); invalid entries are skipped.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V.

    Args:
        reward: [T] reward of each credited step.
        value: [T] value estimate before each step.
        bootstrap: [E] value after the last valid step: 0 where the episode terminated, the estimate for its final
            observation where it was truncated or cut.
        valid: [T] bool, the step was executed.
        gamma: discount per credited step.
        lam: GAE lambda.
        ends: [E] end index of each of several concatenated episodes; None: all entries are one episode.

    Returns:
        advantages [T] and returns [T]; 0 where not valid.
    """
    reward, value = np.asarray(reward, dtype=np.float64), np.asarray(value, dtype=np.float64)
    valid = np.asarray(valid, dtype=bool)
    steps, stops = np.flatnonzero(valid), np.asarray([len(reward)] if ends is None else ends)
    # Indices count valid steps only. An episode without valid steps is dropped.
    after: list[float | None] = [None] * (len(steps) + 1)
    places = np.concatenate([[0], valid.cumsum()])[stops]
    for place, estimate in zip(places.tolist(), np.ravel(bootstrap).tolist(), strict=True):
        # Where several episodes have the same end index, only the first has valid steps.
        if after[place] is None:
            after[place] = estimate
    # Python floats: indexing numpy scalars is ten times slower.
    found: list[float] = []
    following = running = 0.0
    for r, v, first in zip(reward[steps][::-1].tolist(), value[steps][::-1].tolist(), after[:0:-1], strict=True):
        # Last step of an episode: reset the advantage carried backwards.
        if first is not None:
            following, running = first, 0.0
        running = r + gamma * following - v + gamma * lam * running
        found.append(running)
        following = v
    advantage, returns = np.zeros_like(reward), np.zeros_like(reward)
    advantage[steps] = found[::-1]
    returns[steps] = advantage[steps] + value[steps]
    return advantage, returns


def step_groups(states: Sequence[npt.NDArray[np.int64]], groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return a group number for each chunk step; equal states within one group have the same number (GiGPO).

    Args:
        states: [T_i] state hash of each chunk step of each episode.
        groups: group id of each episode.

    Returns:
        [sum T_i] ids, episode by episode.
    """
    numbers: dict[tuple[Hashable, int], int] = {}
    keys = [(group, int(state)) for group, own in zip(groups, states, strict=True) for state in own]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


class GigpoSettings(StdSettings, DiscountSettings):
    """Settings of GiGPO (group-in-group policy optimization)."""

    step_advantage_weight: Positive = 1.0
    """gigpo: weight of the step-level advantage, which compares visits of the same state."""


def _gigpo(episodes: Sequence[Episode], scores: Scores, cfg: GigpoSettings) -> list[Credit]:
    """Add the episode's group advantage to the step advantage, which compares visits of the same state (GiGPO)."""
    groups = [episode.spec.group_id for episode in episodes]
    normalize, unbiased = cfg.normalize_advantages, cfg.std_unbiased
    episode_level = grpo(
        [episode.episode_return for episode in episodes], groups, normalize=normalize, unbiased=unbiased
    )
    ran: list[BoolArray] = [np.asarray(e.valid.any(axis=1)) for e in episodes]
    to_go = [
        discounted(np.where(e.valid, e.reward, 0.0).sum(axis=1), own, gamma=cfg.gamma)
        for e, own in zip(episodes, ran, strict=True)
    ]
    # Visits of one state are compared like the episodes of a group. Chunks without an executed action are excluded from
    # the mean.
    executed, anchors = np.concatenate(ran), step_groups(scores.states, groups)
    steps = np.zeros(len(executed))
    steps[executed] = grpo(np.concatenate(to_go)[executed], anchors[executed], normalize=normalize, unbiased=unbiased)
    parts = np.split(steps, np.cumsum([len(own) for own in ran])[:-1])
    return [
        spread(e, one + cfg.step_advantage_weight * part[:, None])
        for e, one, part in zip(episodes, episode_level, parts, strict=True)
    ]


GIGPO = AdvantageEstimator(compute=_gigpo, settings=GigpoSettings, needs_states=True)


class GaeSettings(ValueSettings, DiscountSettings, NormalizeSettings):
    """Settings of generalised advantage estimation."""

    normalize_returns: bool = False
    """Divide rewards by the running standard deviation of discounted returns; reported returns are unscaled."""
    gae_lambda: Share = 1.0
    """GAE lambda."""
    normalize_per_task: bool = False
    """Whiten within each task, so that tasks with a small reward variance have the same weight."""


class ReturnSettings(CreditSettings, DiscountSettings):
    """Settings of discounted returns-to-go."""


def gae_credits(episodes: Sequence[Episode], _: Scores, cfg: GaeSettings) -> list[Credit]:
    """Estimate advantages from a value head that predicts the return of each chunk (V = 1) or action (V = K)."""
    valid, reward, value = (
        np.concatenate(part)
        for part in zip(*((episode.valid, episode.reward, episode.value) for episode in episodes), strict=True)
    )
    credited, reward = _credited(valid, cfg), _rewards(valid, reward, cfg)
    assert value.shape == reward.shape, f"value {value.shape} against rewards {reward.shape}"
    ends = np.cumsum([len(episode.valid) for episode in episodes])
    bootstrap = [0.0 if episode.terminated else float(episode.bootstrap_value[0]) for episode in episodes]
    advantage, returns = (
        found.reshape(reward.shape)
        for found in gae(
            reward.ravel(),
            value.ravel(),
            bootstrap,
            credited.ravel(),
            gamma=cfg.gamma,
            lam=cfg.gae_lambda,
            # `gae` takes one entry per credited step: K per chunk at action level, else 1.
            ends=ends * reward.shape[1],
        )
    )
    if cfg.normalize_advantages:
        # Whiten after the value targets are computed: targets keep the scale of the reward.
        tasks = [episode.spec.task_id if cfg.normalize_per_task else 0 for episode in episodes]
        of_rows = np.repeat(tasks, np.diff(ends, prepend=0))
        for task in set(tasks):
            _whiten([advantage], [credited & (of_rows == task)[:, None]])
    advantage, returns = np.where(valid, advantage, 0.0).astype(np.float32), returns.astype(np.float32)
    starts = [0, *ends.tolist()]
    return [Credit(advantage=advantage[a:b], returns=returns[a:b]) for a, b in pairwise(starts)]


def reinforce_pp_credits(episodes: Sequence[Episode], _: Scores, cfg: ReturnSettings) -> list[Credit]:
    """Whiten discounted returns-to-go over the batch (REINFORCE++, arXiv 2501.03262)."""
    parts = [_to_go(episode, cfg, cfg.gamma) for episode in episodes]
    return _whitened_credits(episodes, parts, [_credited(episode.valid, cfg) for episode in episodes])


def remax_credits(episodes: Sequence[Episode], scores: Scores, cfg: CreditSettings) -> list[Credit]:
    """Subtract the return of the greedy episode from the same initial state (ReMax, arXiv 2310.10505).

    The advantage is 0 where the greedy episode was lost to a worker crash.
    """
    return [
        spread(e, 0.0 if greedy is None else _to_go(e, cfg, 1.0) - shape_rewards([greedy], cfg)[0].episode_return)
        for e, greedy in zip(episodes, scores.greedy, strict=True)
    ]


def reinforce_pp_baseline_credits(episodes: Sequence[Episode], _: Scores, cfg: GroupSettings) -> list[Credit]:
    """Whiten R - mean_g over all executed actions of the batch (arXiv 2501.03262); longer episodes have more weight."""
    del cfg
    groups = [episode.spec.group_id for episode in episodes]
    centred = grpo([episode.episode_return for episode in episodes], groups, normalize=False)
    masks = [episode.valid for episode in episodes]
    return _whitened_credits(episodes, [np.where(m, one, 0.0) for m, one in zip(masks, centred, strict=True)], masks)


def _whitened_credits(
    episodes: Sequence[Episode], parts: list[DoubleArray], masks: Sequence[BoolArray]
) -> list[Credit]:
    _whiten(parts, masks)
    return [spread(episode, part) for episode, part in zip(episodes, parts, strict=True)]


def _whiten(parts: Sequence[DoubleArray], masks: Sequence[BoolArray]) -> None:
    """Whiten the masked entries over the whole batch, in place."""
    if not parts:
        return
    flat = whiten(np.concatenate([part[m] for part, m in zip(parts, masks, strict=True)]))
    ends = np.cumsum([int(m.sum()) for m in masks])
    for part, mask, own in zip(parts, masks, np.split(flat, ends[:-1]), strict=True):
        part[mask] = own


def _to_go(episode: Episode, cfg: CreditSettings, gamma: float) -> DoubleArray:
    reward = _rewards(episode.valid, episode.reward, cfg)
    return discounted(reward.ravel(), _credited(episode.valid, cfg).ravel(), gamma=gamma).reshape(reward.shape)


def _rewards(valid: BoolArray, reward: FloatArray, cfg: CreditSettings) -> DoubleArray:
    """Return the reward of each credited step, [T, 1] or [T, K]."""
    earned = np.where(valid, reward, 0.0).astype(np.float64)
    return earned.sum(axis=1, keepdims=True) if cfg.reward_type == RewardLevel.chunk_level else earned


def _credited(valid: BoolArray, cfg: CreditSettings) -> BoolArray:
    """Return the mask of credited steps: chunks with an executed action [T, 1], or executed actions [T, K]."""
    if cfg.reward_type == RewardLevel.chunk_level:
        return np.asarray(valid.any(axis=1, keepdims=True))
    return valid


GAE = AdvantageEstimator(compute=gae_credits, settings=GaeSettings, counts_chunk_steps=True)
REINFORCE_PP = AdvantageEstimator(compute=reinforce_pp_credits, settings=ReturnSettings)
REMAX = AdvantageEstimator(compute=remax_credits, settings=CreditSettings, needs_greedy=True)
REINFORCE_PP_BASELINE = AdvantageEstimator(compute=reinforce_pp_baseline_credits, settings=GroupSettings)
