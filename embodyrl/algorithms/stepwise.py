"""Estimators with one credit per chunk or per action (`reward_type`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from embodyrl.algorithms.advantages import Float64, discounted, gae, grpo, whiten
from embodyrl.algorithms.outcome import spread
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import (
    CreditSettings,
    DiscountSettings,
    GroupSettings,
    NormalizeSettings,
    ReplaySettings,
    ReturnScaleSettings,
    RewardLevel,
    ValueSettings,
)
from embodyrl.algorithms.shaping import shape_rewards
from embodyrl.config.settings import Share
from embodyrl.types import BoolArray, Episode, FloatArray


class GaeSettings(ValueSettings, ReturnScaleSettings, NormalizeSettings):
    """Generalised advantage estimation."""

    gae_lambda: Share = 1.0
    """GAE lambda."""


class ReturnSettings(CreditSettings, DiscountSettings):
    """Discounted returns-to-go."""


class RemaxSettings(CreditSettings):
    """ReMax."""

    def idle(self) -> Iterator[tuple[str, str]]:
        """A normalised return cannot be compared with the greedy one."""
        yield from super().idle()
        yield "algorithm.reward_norm", "adv_type 'remax' compares with the greedy episode; choose another one"


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
            ends=ends * reward.shape[1],
        )
    )
    if cfg.normalize_advantages:
        _whiten([advantage], [credited])
    advantage, returns = np.where(valid, advantage, 0.0).astype(np.float32), returns.astype(np.float32)
    starts = [0, *ends.tolist()]
    return [Credit(advantage=advantage[a:b], returns=returns[a:b]) for a, b in pairwise(starts)]


def reinforce_pp_credits(episodes: Sequence[Episode], _: Scores, cfg: ReturnSettings) -> list[Credit]:
    """Whiten discounted returns-to-go over the batch (REINFORCE++, arXiv 2501.03262)."""
    parts = [_to_go(episode, cfg, cfg.gamma) for episode in episodes]
    return _whitened_credits(episodes, parts, [_credited(episode.valid, cfg) for episode in episodes])


def remax_credits(episodes: Sequence[Episode], scores: Scores, cfg: RemaxSettings) -> list[Credit]:
    """Return-to-go minus the return of the greedy episode from the same initial state (ReMax, arXiv 2310.10505).

    An episode whose greedy one was lost to a crashed env worker has nothing to be compared with: its advantage is 0.
    """
    return [
        spread(e, 0.0 if greedy is None else _to_go(e, cfg, 1.0) - shape_rewards([greedy], cfg)[0].episode_return)
        for e, greedy in zip(episodes, scores.greedy, strict=True)
    ]


def reinforce_pp_baseline_credits(episodes: Sequence[Episode], _: Scores, cfg: GroupSettings) -> list[Credit]:
    """Whiten R - mean_g over all executed actions of the batch: longer episodes weigh more (arXiv 2501.03262)."""
    del cfg
    groups = [episode.spec.group_id for episode in episodes]
    centred = grpo([episode.episode_return for episode in episodes], groups, normalize=False)
    masks = [episode.valid for episode in episodes]
    return _whitened_credits(episodes, [np.where(m, one, 0.0) for m, one in zip(masks, centred, strict=True)], masks)


def _whitened_credits(episodes: Sequence[Episode], parts: list[Float64], masks: Sequence[BoolArray]) -> list[Credit]:
    _whiten(parts, masks)
    return [spread(episode, part) for episode, part in zip(episodes, parts, strict=True)]


def _whiten(parts: Sequence[Float64], masks: Sequence[BoolArray]) -> None:
    """Whiten the entries under the masks over the whole batch, in place."""
    if not parts:
        return
    flat = whiten(np.concatenate([part[m] for part, m in zip(parts, masks, strict=True)]))
    ends = np.cumsum([int(m.sum()) for m in masks])
    for part, mask, own in zip(parts, masks, np.split(flat, ends[:-1]), strict=True):
        part[mask] = own


def sac_credits(episodes: Sequence[Episode], _: Scores, cfg: ReplaySettings) -> list[Credit]:
    """Each action carries its own reward to the buffer."""
    del cfg
    return [Credit(advantage=e.reward, returns=np.zeros_like(e.value)) for e in episodes]


def _to_go(episode: Episode, cfg: CreditSettings, gamma: float) -> Float64:
    reward = _rewards(episode.valid, episode.reward, cfg)
    return discounted(reward.ravel(), _credited(episode.valid, cfg).ravel(), gamma=gamma).reshape(reward.shape)


def _rewards(valid: BoolArray, reward: FloatArray, cfg: CreditSettings) -> Float64:
    """Return the reward of each credited step, [T, 1] or [T, K]."""
    earned = np.where(valid, reward, 0.0).astype(np.float64)
    return earned.sum(axis=1, keepdims=True) if cfg.reward_type == RewardLevel.chunk_level else earned


def _credited(valid: BoolArray, cfg: CreditSettings) -> BoolArray:
    """Return the mask of credited steps: chunks that ran at all [T, 1], or executed actions [T, K]."""
    if cfg.reward_type == RewardLevel.chunk_level:
        return np.asarray(valid.any(axis=1, keepdims=True))
    return valid


SAC = AdvantageEstimator(compute=sac_credits, settings=ReplaySettings, counts_chunk_steps=True)
GAE = AdvantageEstimator(compute=gae_credits, settings=GaeSettings, counts_chunk_steps=True)
REINFORCE_PP = AdvantageEstimator(compute=reinforce_pp_credits, settings=ReturnSettings)
REMAX = AdvantageEstimator(compute=remax_credits, settings=RemaxSettings, needs_greedy=True)
REINFORCE_PP_BASELINE = AdvantageEstimator(compute=reinforce_pp_baseline_credits, settings=GroupSettings)
