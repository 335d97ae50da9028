"""Advantage estimators GiGPO, REINFORCE++ and ReMax, computed in float64."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from embodyrl.algorithms.estimators import (
    StdSettings,
    broadcast_advantage,
    gae,
    get_groups,
    get_returns,
    grpo,
    select_credited_steps,
    sum_rewards,
    whiten,
)
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, EstimatorInputs
from embodyrl.algorithms.settings import CreditSettings, DiscountSettings, GroupSettings, RewardNorm
from embodyrl.algorithms.shaping import shape_rewards
from embodyrl.config.settings import Positive
from embodyrl.types import BoolArray, DoubleArray, Episode


def compute_returns_to_go(reward: npt.ArrayLike, valid: npt.ArrayLike, *, gamma: float) -> DoubleArray:
    """Return the discounted return-to-go [T] of one episode: sum over s >= t of gamma^(s-t) r_s.

    Invalid steps are skipped.
    """
    reward = np.asarray(reward, dtype=np.float64)
    return gae(reward, np.zeros_like(reward), 0.0, valid, gamma=gamma, lam=1.0)[0]


def assign_step_groups(states: Sequence[npt.NDArray[np.int64]], groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return a step-group id for each chunk step: equal states within an episode group share an id (GiGPO).

    Args:
        states: [T_i] state hash of each chunk step of each episode.
        groups: group id of each episode.

    Returns:
        [sum T_i] step-group ids, concatenated over episodes.
    """
    numbers: dict[tuple[Hashable, int], int] = {}
    keys = [(group, int(state)) for group, own in zip(groups, states, strict=True) for state in own]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


class GigpoSettings(StdSettings, DiscountSettings):
    """Settings of GiGPO (group-in-group policy optimization)."""

    step_advantage_weight: Positive = 1.0
    """With adv_type=gigpo: weight of the step-level advantage, computed among steps in the same state."""


def _compute_gigpo_credits(episodes: Sequence[Episode], inputs: EstimatorInputs, cfg: GigpoSettings) -> list[Credit]:
    """Return the sum of the episode advantage and the weighted step advantage (GiGPO).

    The step advantage is relative to the other visits of the same state.
    """
    groups, normalize, unbiased = get_groups(episodes), cfg.normalize_advantages, cfg.std_unbiased
    episode_level = grpo(get_returns(episodes), groups, normalize=normalize, unbiased=unbiased)
    executed_steps: list[BoolArray] = [np.asarray(e.valid.any(axis=1)) for e in episodes]
    returns_to_go = [
        compute_returns_to_go(np.where(e.valid, e.reward, 0.0).sum(axis=1), own, gamma=cfg.gamma)
        for e, own in zip(episodes, executed_steps, strict=True)
    ]
    # Visits of one state are compared like the episodes of a group. Chunks without an executed action are excluded from
    # the mean.
    executed, anchors = np.concatenate(executed_steps), assign_step_groups(inputs.states, groups)
    steps = np.zeros(len(executed))
    steps[executed] = grpo(
        np.concatenate(returns_to_go)[executed], anchors[executed], normalize=normalize, unbiased=unbiased
    )
    parts = np.split(steps, np.cumsum([len(own) for own in executed_steps])[:-1])
    return [
        broadcast_advantage(e, episode_advantage + cfg.step_advantage_weight * part[:, None])
        for e, episode_advantage, part in zip(episodes, episode_level, parts, strict=True)
    ]


GIGPO = AdvantageEstimator(compute=_compute_gigpo_credits, settings=GigpoSettings, needs_states=True)


class ReturnSettings(CreditSettings, DiscountSettings):
    """Settings of estimators that use discounted returns-to-go."""


def compute_reinforce_pp_credits(episodes: Sequence[Episode], _: EstimatorInputs, cfg: ReturnSettings) -> list[Credit]:
    """Return discounted returns-to-go, whitened over the batch (REINFORCE++, arXiv 2501.03262)."""
    parts = [_compute_returns_to_go(episode, cfg, cfg.gamma) for episode in episodes]
    return _whiten_credits(episodes, parts, [select_credited_steps(episode.valid, cfg) for episode in episodes])


class RemaxSettings(CreditSettings):
    """Settings of ReMax."""

    def problems(self) -> Iterator[str]:
        """Yield one message per contradiction between settings."""
        yield from super().problems()
        if self.reward_norm is not RewardNorm.none:
            yield (
                f"algorithm.reward_norm={self.reward_norm}: adv_type '{self.adv_type}' compares each episode with a "
                "greedy episode, which has no group or batch to normalize over. Remove reward_norm."
            )


def compute_remax_credits(episodes: Sequence[Episode], inputs: EstimatorInputs, cfg: RemaxSettings) -> list[Credit]:
    """Return the return-to-go minus the return of the greedy episode from the same state (ReMax, arXiv 2310.10505).

    The advantage is 0 where the greedy episode was lost to a worker crash.
    """
    return [
        broadcast_advantage(
            e,
            0.0
            if greedy is None
            else _compute_returns_to_go(e, cfg, 1.0) - shape_rewards([greedy], cfg)[0].episode_return,
        )
        for e, greedy in zip(episodes, inputs.greedy, strict=True)
    ]


def compute_reinforce_pp_baseline_credits(
    episodes: Sequence[Episode], _: EstimatorInputs, _cfg: GroupSettings
) -> list[Credit]:
    """Return R minus the group mean, whitened over all executed actions of the batch (arXiv 2501.03262).

    Longer episodes have more weight in the mean and variance.
    """
    centered = grpo(get_returns(episodes), get_groups(episodes), normalize=False)
    masks = [episode.valid for episode in episodes]
    parts = [np.where(mask, advantage, 0.0) for mask, advantage in zip(masks, centered, strict=True)]
    return _whiten_credits(episodes, parts, masks)


def _whiten_credits(episodes: Sequence[Episode], parts: list[DoubleArray], masks: Sequence[BoolArray]) -> list[Credit]:
    """Whiten the entries in `masks` of all episodes together."""
    advantage, mask = np.concatenate(parts), np.concatenate(masks)
    advantage[mask] = whiten(advantage[mask])
    whitened = np.split(advantage, np.cumsum([len(part) for part in parts])[:-1])
    return [broadcast_advantage(episode, part) for episode, part in zip(episodes, whitened, strict=True)]


def _compute_returns_to_go(episode: Episode, cfg: CreditSettings, gamma: float) -> DoubleArray:
    reward = sum_rewards(episode.valid, episode.reward, cfg)
    return compute_returns_to_go(
        reward.ravel(), select_credited_steps(episode.valid, cfg).ravel(), gamma=gamma
    ).reshape(reward.shape)


REINFORCE_PP = AdvantageEstimator(compute=compute_reinforce_pp_credits, settings=ReturnSettings)


REMAX = AdvantageEstimator(compute=compute_remax_credits, settings=RemaxSettings, needs_greedy=True)


REINFORCE_PP_BASELINE = AdvantageEstimator(compute=compute_reinforce_pp_baseline_credits, settings=GroupSettings)
