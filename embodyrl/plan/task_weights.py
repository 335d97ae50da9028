"""Sampling of initial states by task weights, and by a curriculum that prefers a high success variance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodyrl.algorithms.shaping import TaskOutcomes
from embodyrl.envs.settings import EnvSplit
from embodyrl.plan.initial_states import get_reset_ids, select_tasks
from embodyrl.plan.schema import Config
from embodyrl.types import EnvSpec, Episode

_DECAY = 0.5
"""Decay factor of earlier counts, applied in each training step that samples the task (or reset id)."""


def record_outcomes(outcomes: TaskOutcomes, episodes: Sequence[Episode], *, by_task: bool) -> None:
    """Add the successes and episodes of a training step to the counts `outcomes`, after decaying earlier counts."""
    step_outcomes: TaskOutcomes = {}
    for episode in (entry for entry in episodes if not entry.cut):  # the outcome of a cut episode is unknown
        counts = step_outcomes.setdefault(str(episode.spec.task_id if by_task else episode.spec.reset_id), [0.0, 0.0])
        counts[0] += episode.success_once
        counts[1] += 1
    for name, (successes, num_episodes) in step_outcomes.items():
        earlier = outcomes.get(name, [0.0, 0.0])
        # Only the counts of sampled tasks decay.
        outcomes[name] = [_DECAY * earlier[0] + successes, _DECAY * earlier[1] + num_episodes]


def success_variance(outcomes: TaskOutcomes, name: int) -> float:
    """Return the success variance 4 p (1 - p), in 0..1, of the success rate p = (successes + 1) / (episodes + 2)."""
    successes, num_episodes = outcomes.get(str(name), (0.0, 0.0))
    rate = (successes + 1) / (num_episodes + 2)
    return 4 * rate * (1 - rate)


def has_task_weights(env: EnvSpec, split: EnvSplit) -> bool:
    """Return True if tasks are weighted, or False if the reset ids of a single selected task are weighted."""
    return len(select_tasks(env, split)) > 1


def _get_weighted_ids(env: EnvSpec, split: EnvSplit) -> dict[int, Sequence[int]]:
    """Return the reset ids to which each weight applies, by task id, or by reset id if there is one task."""
    ids_by_task = {task: get_reset_ids(env, split, task) for task in select_tasks(env, split)}
    if has_task_weights(env, split):
        return {**ids_by_task}
    return {reset_id: [reset_id] for ids in ids_by_task.values() for reset_id in ids}


def sample_weighted_ids(cfg: Config, env: EnvSpec, count: int, outcomes: TaskOutcomes | None, seed: int) -> list[int]:
    """Sample the reset ids of `count` groups by task weights and by success variance p (1 - p).

    Tasks (or the reset ids of a single task) are sampled systematically: the number of groups of each is proportional
    to its weight, rounded up or down.
    """
    rng, weighted_ids = np.random.default_rng(seed), _get_weighted_ids(env, cfg.env.train)
    weights = np.asarray(cfg.env.train.task_weights or [1.0] * len(weighted_ids))
    scaled = weights * np.asarray([success_variance(outcomes or {}, name) for name in weighted_ids])
    share = cfg.algorithm.curriculum
    probabilities = (1 - share) * weights / weights.sum() + share * scaled / scaled.sum()
    indices = np.searchsorted(probabilities.cumsum(), (rng.random() + np.arange(count)) / count, side="right")
    rng.shuffle(indices)
    # The cumulative sum may end slightly below 1 by rounding: samples beyond the sum use the last ids.
    all_ids = list(weighted_ids.values())
    sampled_ids = (all_ids[min(index, len(all_ids) - 1)] for index in indices)
    return [ids[int(rng.integers(len(ids)))] for ids in sampled_ids]


def has_weights(cfg: Config) -> bool:
    """Return True if the config samples initial states with unequal probabilities."""
    return bool(cfg.algorithm.curriculum) or cfg.env.train.task_weights is not None


def weight_problems(cfg: Config, env: EnvSpec, *, counts_chunk_steps: bool) -> list[str]:
    """Return one error for each invalid key that sets task weights or the curriculum.

    Weights need one number per task (or per reset id of a single task), and environments with assigned initial states.
    """
    if not has_weights(cfg):
        return []
    split = cfg.env.train
    if not counts_chunk_steps or (split.use_fixed_reset_state_ids and not split.continue_episodes):
        num_weights, num_needed = len(split.task_weights or ()), len(_get_weighted_ids(env, split))
        error = (
            f"env.train.task_weights has {num_weights} weights for {num_needed} tasks; set one weight for each task."
        )
        return [error] if num_weights not in (0, num_needed) else []
    weight_keys = {"algorithm.curriculum": cfg.algorithm.curriculum, "env.train.task_weights": split.task_weights}
    return [
        f"{key} weights initial states, but environments choose initial states freely; set "
        f"env.train.use_fixed_reset_state_ids=true and env.train.continue_episodes=false, or remove {key}."
        for key, value in weight_keys.items()
        if value
    ]
