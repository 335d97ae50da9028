"""Advantage estimators: what `adv_type` names.

First those with one credit per episode, from its undiscounted return and those of its group (one reset id); then those
with one credit per chunk or per action (`reward_type`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from embodyrl.algorithms import advantages
from embodyrl.algorithms.advantages import discounted, gae, whiten
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import (
    CreditSettings,
    DiscountSettings,
    GroupSettings,
    NormalizeSettings,
    ReplaySettings,
    ReturnScaleSettings,
    RewardLevel,
    TruncatedEpisodes,
    ValueSettings,
)
from embodyrl.algorithms.shaping import shape_rewards
from embodyrl.config.settings import Positive, Share
from embodyrl.types import BoolArray, DoubleArray, Episode, FloatArray


def spread(episode: Episode, advantage: float | DoubleArray) -> Credit:
    """Give an advantage, one number, [T, 1] or [T, K], to all executed actions of an episode without value targets."""
    given = np.where(episode.valid, advantage, 0.0).astype(np.float32)
    return Credit(advantage=given, returns=np.zeros((len(given), 0), np.float32))


class StdSettings(GroupSettings, NormalizeSettings):
    """An estimator that divides by the standard deviation of a group."""

    std_unbiased: bool = True
    """Standard deviation of a group with n - 1 instead of n in the denominator."""

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what is about a deviation that nothing is divided by."""
        yield from super().idle()
        if not self.normalize_advantages:
            yield "algorithm.std_unbiased", "normalize_advantages is false; set it to true"


class PassAtKSettings(GroupSettings, NormalizeSettings):
    """pass@k."""


class GdpoSettings(GroupSettings):
    """GDPO."""

    def problems(self) -> Iterator[str]:
        """What an episode would have earned is no part of it."""
        yield from super().problems()
        if self.truncated_episodes is TruncatedEpisodes.zero_reward:
            yield (
                "algorithm.truncated_episodes=zero_reward: adv_type 'gdpo' credits each part of the reward by itself, "
                "and those stay; use mask."
            )

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what shapes a sum that is never formed."""
        yield from super().idle()
        for key in ("reward_scale", "reward_bias", "reward_clip", "reward_norm", "kl_in_reward"):
            yield f"algorithm.{key}", "adv_type 'gdpo' credits each part of the reward by itself; choose another one"


class GigpoSettings(StdSettings, DiscountSettings):
    """GiGPO."""

    step_advantage_weight: Positive = 1.0
    """gigpo: weight of a step's advantage among visits of the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What an outcome estimator compares."""

    episodes: Sequence[Episode]
    scores: Scores

    @property
    def returns(self) -> list[float]:
        """[E] undiscounted return of each episode."""
        return [episode.episode_return for episode in self.episodes]

    @property
    def groups(self) -> list[int]:
        """[E] group of each episode."""
        return [episode.spec.group_id for episode in self.episodes]


def outcome_estimator(
    compute: Callable[[Outcomes, Any], DoubleArray], settings: type[GroupSettings] = GroupSettings
) -> AdvantageEstimator:
    """Spread the advantage [E] of each episode over all its actions; it is 0 where the rest of the group is missing."""

    def credits(episodes: Sequence[Episode], scores: Scores, cfg: GroupSettings) -> list[Credit]:
        advantage = compute(Outcomes(episodes=episodes, scores=scores), cfg)
        return [spread(episode, one) for episode, one in zip(episodes, advantage, strict=True)]

    return AdvantageEstimator(compute=credits, settings=settings)


def grpo(outcomes: Outcomes, cfg: StdSettings) -> DoubleArray:
    """(R - mean of the group) / standard deviation of the group (arXiv 2402.03300)."""
    normalize, unbiased = cfg.normalize_advantages, cfg.std_unbiased
    return advantages.grpo(outcomes.returns, outcomes.groups, normalize=normalize, unbiased=unbiased)


def rloo(outcomes: Outcomes, _: GroupSettings) -> DoubleArray:
    """R - mean of the group's others (arXiv 2402.14740)."""
    return advantages.rloo(outcomes.returns, outcomes.groups)


def opo(outcomes: Outcomes, _: GroupSettings) -> DoubleArray:
    """R - length-weighted mean of the group (arXiv 2505.23585)."""
    return advantages.opo(outcomes.returns, outcomes.groups, [episode.length for episode in outcomes.episodes])


def gpg(outcomes: Outcomes, _: GroupSettings) -> DoubleArray:
    """Centred returns, scaled up for groups without any signal (arXiv 2504.02546)."""
    return advantages.gpg(outcomes.returns, outcomes.groups)


def pass_at_k(outcomes: Outcomes, cfg: PassAtKSettings) -> DoubleArray:
    """Credit the best of a group alone, with its lead over the second (arXiv 2503.19595)."""
    return advantages.pass_at_k(outcomes.returns, outcomes.groups, normalize=cfg.normalize_advantages)


def gdpo(outcomes: Outcomes, _: GdpoSettings) -> DoubleArray:
    """Credit each part of the reward by itself; where there are no parts, the return is the only one."""
    weights = outcomes.scores.part_weights
    if not weights:
        return advantages.gdpo(np.asarray(outcomes.returns)[:, None], outcomes.groups, [1.0])
    return advantages.gdpo([e.components.sum(axis=0) for e in outcomes.episodes], outcomes.groups, weights)


GRPO = outcome_estimator(grpo, StdSettings)
RLOO = outcome_estimator(rloo)
OPO = outcome_estimator(opo)
GPG = outcome_estimator(gpg)
PASS_AT_K = outcome_estimator(pass_at_k, PassAtKSettings)
GDPO = outcome_estimator(gdpo, GdpoSettings)


def _gigpo(episodes: Sequence[Episode], scores: Scores, cfg: GigpoSettings) -> list[Credit]:
    """Credit of the episode among its group plus credit of each chunk step among the group's visits of its state."""
    groups = [episode.spec.group_id for episode in episodes]
    normalize, unbiased = cfg.normalize_advantages, cfg.std_unbiased
    episode_level = advantages.grpo(
        [episode.episode_return for episode in episodes], groups, normalize=normalize, unbiased=unbiased
    )
    ran: list[BoolArray] = [np.asarray(e.valid.any(axis=1)) for e in episodes]
    to_go = [
        advantages.discounted(np.where(e.valid, e.reward, 0.0).sum(axis=1), own, gamma=cfg.gamma)
        for e, own in zip(episodes, ran, strict=True)
    ]
    # Visits of one state by one group are compared like the episodes of a group; chunks without an executed action
    # visited nothing and stay out of the mean.
    executed, anchors = np.concatenate(ran), advantages.step_groups(scores.states, groups)
    steps = np.zeros(len(executed))
    steps[executed] = advantages.grpo(
        np.concatenate(to_go)[executed], anchors[executed], normalize=normalize, unbiased=unbiased
    )
    parts = np.split(steps, np.cumsum([len(own) for own in ran])[:-1])
    return [
        spread(e, one + cfg.step_advantage_weight * part[:, None])
        for e, one, part in zip(episodes, episode_level, parts, strict=True)
    ]


GIGPO = AdvantageEstimator(compute=_gigpo, settings=GigpoSettings, needs_states=True)


class GaeSettings(ValueSettings, ReturnScaleSettings, NormalizeSettings):
    """Generalised advantage estimation."""

    gae_lambda: Share = 1.0
    """GAE lambda."""
    normalize_per_task: bool = False
    """Whiten within each task, so that one whose rewards change little is learned from as much as the others."""

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what is about whitening."""
        yield from super().idle()
        if not self.normalize_advantages:
            yield "algorithm.normalize_per_task", "normalize_advantages is false; set it to true"


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
    # With one value per action (V = K) the first one stands for what follows the chunk.
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
            # `gae` counts credited steps: K of a chunk at action level, else 1.
            ends=ends * reward.shape[1],
        )
    )
    if cfg.normalize_advantages:
        # After the value targets are formed: those stay in units of the reward.
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
    centred = advantages.grpo([episode.episode_return for episode in episodes], groups, normalize=False)
    masks = [episode.valid for episode in episodes]
    return _whitened_credits(episodes, [np.where(m, one, 0.0) for m, one in zip(masks, centred, strict=True)], masks)


def _whitened_credits(
    episodes: Sequence[Episode], parts: list[DoubleArray], masks: Sequence[BoolArray]
) -> list[Credit]:
    _whiten(parts, masks)
    return [spread(episode, part) for episode, part in zip(episodes, parts, strict=True)]


def _whiten(parts: Sequence[DoubleArray], masks: Sequence[BoolArray]) -> None:
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


def _to_go(episode: Episode, cfg: CreditSettings, gamma: float) -> DoubleArray:
    reward = _rewards(episode.valid, episode.reward, cfg)
    return discounted(reward.ravel(), _credited(episode.valid, cfg).ravel(), gamma=gamma).reshape(reward.shape)


def _rewards(valid: BoolArray, reward: FloatArray, cfg: CreditSettings) -> DoubleArray:
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
