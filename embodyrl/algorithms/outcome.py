"""Estimators with one credit per episode, from its undiscounted return and those of its group (one reset id)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from embodyrl.algorithms import advantages
from embodyrl.algorithms.advantages import Float64
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.types import BoolArray, Episode

Compute = Callable[[Sequence[Episode], list[float], list[int], AlgorithmConfig, Scores], Float64]
"""(episodes, returns, groups, config, scores) -> [E] advantages."""


def spread(episode: Episode, advantage: float | Float64) -> Credit:
    """Give an advantage, one number, [T, 1] or [T, K], to all executed actions of an episode without value targets."""
    given = np.where(episode.valid, advantage, 0.0).astype(np.float32)
    return Credit(advantage=given, returns=np.zeros((len(given), 0), np.float32))


def outcome_estimator(compute: Compute, *consumes: str, ignores: frozenset[str] = frozenset()) -> AdvantageEstimator:
    """Spread the advantage of each episode over all its actions; it is 0 where a crash took the rest of the group."""

    def credits(episodes: Sequence[Episode], scores: Scores, cfg: AlgorithmConfig) -> list[Credit]:
        groups = [episode.spec.group_id for episode in episodes]
        advantage = compute(episodes, [episode.episode_return for episode in episodes], groups, cfg, scores)
        return [spread(episode, one) for episode, one in zip(episodes, advantage, strict=True)]

    return AdvantageEstimator(compute=credits, consumes=frozenset(consumes), ignores=ignores, needs_groups=True)


GRPO = outcome_estimator(
    lambda _, reward, group, cfg, __: advantages.grpo(
        reward, group, normalize=cfg.normalize_advantages, unbiased=cfg.std_unbiased
    ),
    "normalize_advantages",
    "std_unbiased",
)
RLOO = outcome_estimator(lambda _, reward, group, *__: advantages.rloo(reward, group))
OPO = outcome_estimator(
    lambda episodes, reward, group, *_: advantages.opo(reward, group, [episode.length for episode in episodes])
)
GPG = outcome_estimator(lambda _, reward, group, *__: advantages.gpg(reward, group))
PASS_AT_K = outcome_estimator(
    lambda _, reward, group, cfg, __: advantages.pass_at_k(reward, group, normalize=cfg.normalize_advantages),
    "normalize_advantages",
)


def _gdpo(
    episodes: Sequence[Episode], returns: list[float], groups: list[int], _: AlgorithmConfig, scores: Scores
) -> Float64:
    """Credit each part of the reward by itself; where there are no parts, the return is the only one."""
    if not scores.part_weights:
        return advantages.gdpo(np.asarray(returns)[:, None], groups, [1.0])
    return advantages.gdpo([e.components.sum(axis=0) for e in episodes], groups, scores.part_weights)


GDPO = outcome_estimator(
    _gdpo,
    ignores=frozenset({"reward_scale", "reward_bias", "reward_clip", "reward_norm"})
    | {"kl_in_reward", "kl_target", "kl_horizon"},
)


def _gigpo(episodes: Sequence[Episode], scores: Scores, cfg: AlgorithmConfig) -> list[Credit]:
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
    # A chunk without an executed action visited nothing.
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


GIGPO = AdvantageEstimator(
    compute=_gigpo,
    consumes=frozenset({"normalize_advantages", "std_unbiased", "gamma", "step_advantage_weight"}),
    needs_groups=True,
    needs_states=True,
)
