"""Outcome advantages: each episode is compared with its group (the episodes of one reset id).

The formulas are pure numpy, computed in float64: R [E] is the outcome reward of each episode, g [E] its group, mean_g
and std_g are taken over the group. All actions of an episode share its advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import GroupSettings, NormalizeSettings
from embodyrl.types import DoubleArray, Episode


def by_group(
    compute: Callable[..., npt.ArrayLike], group: npt.ArrayLike, reward: npt.ArrayLike, *more: npt.ArrayLike
) -> DoubleArray:
    """Apply `compute` to the rewards (and additional [E] columns) of each group.

    Groups of one, or with equal rewards, get 0.
    """
    group, columns = np.asarray(group), [np.asarray(column, dtype=np.float64) for column in (reward, *more)]
    assert all(column.shape == group.shape for column in columns)
    out = np.zeros(group.shape)
    for name in np.unique(group):
        member = group == name
        if np.ptp(columns[0][member]) > 0:  # rounding of the mean must not turn equal rewards into a tiny advantage
            out[member] = compute(*(column[member] for column in columns))
    return out


def grpo(
    reward: npt.ArrayLike, group: npt.ArrayLike, *, normalize: bool = True, unbiased: bool = True, eps: float = 1e-6
) -> DoubleArray:
    """Compute (R - mean_g) / (std_g + eps), arXiv 2402.03300; 0 for a group of one.

    Args:
        reward: [E] outcome rewards.
        group: [E] group ids.
        normalize: divide by the group's standard deviation; False is Dr.GRPO (arXiv 2503.20783).
        unbiased: standard deviation with ddof 1, else 0.
        eps: added to the standard deviation.

    Returns:
        [E] advantages.
    """

    def standardised(rewards: DoubleArray) -> DoubleArray:
        scale = rewards.std(ddof=int(unbiased)) + eps if normalize else 1.0
        return (rewards - rewards.mean()) / scale

    return by_group(standardised, group, reward)


def whiten(values: npt.ArrayLike, *, eps: float = 1e-8) -> DoubleArray:
    """Standardise to mean 0 and variance 1: (x - mean) / sqrt(var + eps), var with ddof 1.

    Fewer than two values have no variance and become 0.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + eps)


class StdSettings(GroupSettings, NormalizeSettings):
    """Settings of estimators that divide by the standard deviation of a group."""

    std_unbiased: bool = True
    """Use n - 1 instead of n in the denominator of a group's standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Inputs of an outcome estimator."""

    episodes: Sequence[Episode]
    scores: Scores

    @property
    def returns(self) -> list[float]:
        """Undiscounted return of each episode, [E]."""
        return [episode.episode_return for episode in self.episodes]

    @property
    def groups(self) -> list[int]:
        """Group of each episode, [E]."""
        return [episode.spec.group_id for episode in self.episodes]


def outcome_estimator(
    compute: Callable[[Outcomes, Any], DoubleArray], settings: type[GroupSettings] = GroupSettings
) -> AdvantageEstimator:
    """Build an estimator that assigns each episode's advantage [E] to all its actions.

    The advantage is 0 where the group is incomplete.
    """

    def credits(episodes: Sequence[Episode], scores: Scores, cfg: GroupSettings) -> list[Credit]:
        advantage = compute(Outcomes(episodes=episodes, scores=scores), cfg)
        return [spread(episode, one) for episode, one in zip(episodes, advantage, strict=True)]

    return AdvantageEstimator(compute=credits, settings=settings)


def spread(episode: Episode, advantage: float | DoubleArray) -> Credit:
    """Assign an advantage (scalar, [T, 1] or [T, K]) to all executed actions of an episode, without value targets."""
    given = np.where(episode.valid, advantage, 0.0).astype(np.float32)
    return Credit(advantage=given, returns=np.zeros((len(given), 0), np.float32))


GRPO = outcome_estimator(
    lambda o, cfg: grpo(o.returns, o.groups, normalize=cfg.normalize_advantages, unbiased=cfg.std_unbiased), StdSettings
)
