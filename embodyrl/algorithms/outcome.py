"""Estimators with one credit per episode, from its undiscounted return and those of its group (one reset id)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.algorithms import advantages
from embodyrl.algorithms.advantages import Float64
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import DiscountSettings, GroupSettings, NormalizeSettings
from embodyrl.config.settings import Positive
from embodyrl.types import BoolArray, Episode


def spread(episode: Episode, advantage: float | Float64) -> Credit:
    """Give an advantage, one number, [T, 1] or [T, K], to all executed actions of an episode without value targets."""
    given = np.where(episode.valid, advantage, 0.0).astype(np.float32)
    return Credit(advantage=given, returns=np.zeros((len(given), 0), np.float32))


class StdSettings(GroupSettings, NormalizeSettings):
    """An estimator that divides by the standard deviation of a group."""

    std_unbiased: bool = True
    """Standard deviation of a group with n - 1 instead of n in the denominator."""


class PassAtKSettings(GroupSettings, NormalizeSettings):
    """pass@k."""


class GdpoSettings(GroupSettings):
    """GDPO."""

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
    compute: Callable[[Outcomes, Any], Float64], settings: type[GroupSettings] = GroupSettings
) -> AdvantageEstimator:
    """Spread the advantage [E] of each episode over all its actions; it is 0 where the rest of the group is missing."""

    def credits(episodes: Sequence[Episode], scores: Scores, cfg: GroupSettings) -> list[Credit]:
        advantage = compute(Outcomes(episodes=episodes, scores=scores), cfg)
        return [spread(episode, one) for episode, one in zip(episodes, advantage, strict=True)]

    return AdvantageEstimator(compute=credits, settings=settings)


def grpo(outcomes: Outcomes, cfg: StdSettings) -> Float64:
    """(R - mean of the group) / standard deviation of the group (arXiv 2402.03300)."""
    normalize, unbiased = cfg.normalize_advantages, cfg.std_unbiased
    return advantages.grpo(outcomes.returns, outcomes.groups, normalize=normalize, unbiased=unbiased)


def rloo(outcomes: Outcomes, _: GroupSettings) -> Float64:
    """R - mean of the group's others (arXiv 2402.14740)."""
    return advantages.rloo(outcomes.returns, outcomes.groups)


def opo(outcomes: Outcomes, _: GroupSettings) -> Float64:
    """R - length-weighted mean of the group (arXiv 2505.23585)."""
    return advantages.opo(outcomes.returns, outcomes.groups, [episode.length for episode in outcomes.episodes])


def gpg(outcomes: Outcomes, _: GroupSettings) -> Float64:
    """Centred returns, scaled up for groups without any signal (arXiv 2504.02546)."""
    return advantages.gpg(outcomes.returns, outcomes.groups)


def pass_at_k(outcomes: Outcomes, cfg: PassAtKSettings) -> Float64:
    """Credit the best of a group alone, with its lead over the second (arXiv 2503.19595)."""
    return advantages.pass_at_k(outcomes.returns, outcomes.groups, normalize=cfg.normalize_advantages)


def gdpo(outcomes: Outcomes, _: GdpoSettings) -> Float64:
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
