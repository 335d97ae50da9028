"""Outcome-based advantage estimators in addition to GRPO; see `algorithms/estimators.py` for the notation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from embodyrl.algorithms.estimators import (
    apply_by_group,
    build_outcome_estimator,
    get_groups,
    get_returns,
    grpo,
    whiten,
)
from embodyrl.algorithms.protocol import EstimatorInputs
from embodyrl.algorithms.settings import GroupSettings, NormalizeSettings, TruncatedEpisodes
from embodyrl.types import DoubleArray, Episode


def rloo(reward: npt.ArrayLike, group: npt.ArrayLike) -> DoubleArray:
    """Return the RLOO advantages (arXiv 2402.14740): R minus the mean return of the other episodes of the group."""

    def subtract_leave_one_out_mean(rewards: DoubleArray) -> DoubleArray:
        n = len(rewards)
        return (rewards - rewards.mean()) * n / (n - 1)

    return apply_by_group(subtract_leave_one_out_mean, group, reward)


def opo(reward: npt.ArrayLike, group: npt.ArrayLike, length: npt.ArrayLike) -> DoubleArray:
    """Return the OPO advantages (arXiv 2505.23585): R minus the group baseline sum(len R) / sum(len)."""

    def subtract_baseline(rewards: DoubleArray, lengths: DoubleArray) -> DoubleArray:
        return rewards - np.average(rewards, weights=lengths)

    return apply_by_group(subtract_baseline, group, reward, length)


def gpg(reward: npt.ArrayLike, group: npt.ArrayLike) -> DoubleArray:
    """Return the GPG advantages alpha (R - mean_g) (arXiv 2504.02546).

    alpha is the number of episodes, divided by the number of episodes with a nonzero reward.
    """
    num_rewarded = max(1, int(np.count_nonzero(reward)))
    return np.size(reward) / num_rewarded * grpo(reward, group, normalize=False)


def pass_at_k(reward: npt.ArrayLike, group: npt.ArrayLike, *, normalize: bool = True, eps: float = 1e-6) -> DoubleArray:
    """Return pass@k advantages (arXiv 2503.19595).

    The best episode of a group gets its return minus the second-best return; all other episodes get 0.

    `normalize` divides by the group's standard deviation (ddof 1) + eps.
    """

    def compute_lead(rewards: DoubleArray) -> DoubleArray:
        second, best = np.sort(rewards)[-2:]
        out = np.zeros_like(rewards)
        out[rewards.argmax()] = (best - second) / (rewards.std(ddof=1) + eps if normalize else 1.0)
        return out

    return apply_by_group(compute_lead, group, reward)


def gdpo(parts: npt.ArrayLike, group: npt.ArrayLike, weight: Sequence[float]) -> DoubleArray:
    """Return the GDPO advantages sum_k w_k grpo(R_k), whitened over the batch (arXiv 2601.05242).

    Each reward component R_k is normalized separately, so that no component dominates.

    Args:
        parts: [E, C] return of each episode in each reward component.
        group: [E] group ids.
        weight: [C] weight w_k of each reward component.
    """
    columns = zip(np.asarray(parts, dtype=np.float64).T, weight, strict=True)
    return whiten(sum(component_weight * grpo(part, group) for part, component_weight in columns))


class PassAtKSettings(GroupSettings, NormalizeSettings):
    """Settings of pass@k, where only the best episode of a group has a nonzero advantage."""


class GdpoSettings(GroupSettings):
    """Settings of GDPO, which normalizes each reward component separately."""

    keys_by_condition = {
        "never: gdpo normalizes each reward component separately": "reward_scale reward_bias reward_clip reward_norm "
        "kl_in_reward"
    }

    def problems(self) -> Iterator[str]:
        """Yield an error for each pair of contradictory settings."""
        yield from super().problems()
        if self.truncated_episodes is TruncatedEpisodes.zero_reward:
            yield (
                "algorithm.truncated_episodes=zero_reward: adv_type 'gdpo' normalizes each reward component "
                "separately, so the outcome cannot be set to 0; use mask."
            )


def _compute_gdpo(episodes: Sequence[Episode], inputs: EstimatorInputs, _: GdpoSettings) -> DoubleArray:
    """Return the `gdpo` advantages; without reward components, the return is the only component."""
    if not inputs.part_weights:
        return gdpo(np.asarray(get_returns(episodes))[:, None], get_groups(episodes), [1.0])
    return gdpo([episode.components.sum(axis=0) for episode in episodes], get_groups(episodes), inputs.part_weights)


RLOO = build_outcome_estimator(lambda episodes, *_: rloo(get_returns(episodes), get_groups(episodes)), GroupSettings)


OPO = build_outcome_estimator(
    lambda episodes, *_: opo(get_returns(episodes), get_groups(episodes), [e.length for e in episodes]), GroupSettings
)


GPG = build_outcome_estimator(lambda episodes, *_: gpg(get_returns(episodes), get_groups(episodes)), GroupSettings)


PASS_AT_K = build_outcome_estimator(
    lambda episodes, _, cfg: pass_at_k(get_returns(episodes), get_groups(episodes), normalize=cfg.normalize_advantages),
    PassAtKSettings,
)


GDPO = build_outcome_estimator(_compute_gdpo, GdpoSettings)
