"""Sampling of initial states by task weights, and by a curriculum that prefers a high success variance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodyrl.algorithms.shaping import Outcomes
from embodyrl.envs.settings import EnvSplit
from embodyrl.plan.initial_states import reset_ids_of, selected_tasks
from embodyrl.plan.schema import Config
from embodyrl.types import EnvSpec, Episode

_MEMORY = 0.5
"""Decay factor of earlier counts, applied in each training step that samples the task (or reset id)."""


def note_outcomes(seen: Outcomes, episodes: Sequence[Episode], *, by_task: bool) -> None:
    """Add the successes and episodes of a training step to the counts `seen`, after decaying earlier counts."""
    now: Outcomes = {}
    for episode in (e for e in episodes if not e.cut):  # the outcome of a cut episode is unknown
        found = now.setdefault(str(episode.spec.task_id if by_task else episode.spec.reset_id), [0.0, 0.0])
        found[0] += episode.success_once
        found[1] += 1
    for name, (won, played) in now.items():
        before = seen.get(name, [0.0, 0.0])
        # Only the counts of sampled tasks decay.
        seen[name] = [_MEMORY * before[0] + won, _MEMORY * before[1] + played]


def openness(seen: Outcomes, name: int) -> float:
    """Return the success variance 4 p (1 - p), in 0..1, of the success rate p = (successes + 1) / (episodes + 2)."""
    won, played = seen.get(str(name), (0.0, 0.0))
    p = (won + 1) / (played + 2)
    return 4 * p * (1 - p)


def weighs_tasks(env: EnvSpec, split: EnvSplit) -> bool:
    """Return True if tasks are weighted, or False if the reset ids of a single selected task are weighted."""
    return len(selected_tasks(env, split)) > 1


def count_weighed(env: EnvSpec, split: EnvSplit) -> int:
    """Return the number of sampling weights: one per selected task, or one per reset id of a single task."""
    tasks = selected_tasks(env, split)
    return len(tasks) if weighs_tasks(env, split) else len(reset_ids_of(env, split, tasks[0]))


def weighted_ids(cfg: Config, env: EnvSpec, count: int, seen: Outcomes | None, seed: int) -> list[int]:
    """Sample the reset ids of `count` groups by task weights and by success variance p (1 - p).

    Tasks (or the reset ids of a single task) are sampled systematically: the number of groups of each is proportional
    to its weight, rounded up or down.
    """
    rng, split, tasks = np.random.default_rng(seed), cfg.env.train, selected_tasks(env, cfg.env.train)
    each = [reset_ids_of(env, split, task) for task in tasks]
    groups, names = (each, tasks) if weighs_tasks(env, split) else ([[i] for i in each[0]], list(each[0]))
    given = np.asarray(split.task_weights or [1.0] * len(groups))
    share, wanted = cfg.algorithm.curriculum, given * np.asarray([openness(seen or {}, name) for name in names])
    chance = (1 - share) * given / given.sum() + share * wanted / wanted.sum()
    drawn = np.searchsorted(chance.cumsum(), (rng.random() + np.arange(count)) / count, side="right")
    rng.shuffle(drawn)
    # The cumulative sum may end slightly below 1 by rounding: samples beyond the sum use the last group.
    return [group[int(rng.integers(len(group)))] for group in (groups[min(i, len(groups) - 1)] for i in drawn)]


def has_weights(cfg: Config) -> bool:
    """Return True if the config samples initial states with unequal probabilities."""
    return bool(cfg.algorithm.curriculum) or cfg.env.train.task_weights is not None


def weight_problems(cfg: Config, env: EnvSpec, *, counts_chunk_steps: bool) -> list[str]:
    """Return one error for each invalid key that sets task weights or the curriculum.

    Weights need one number per task (or per reset id of a single task), and slots with assigned initial states.
    """
    if not has_weights(cfg):
        return []
    split = cfg.env.train
    if not counts_chunk_steps or (split.use_fixed_reset_state_ids and not split.continue_episodes):
        given, wanted = len(split.task_weights or ()), count_weighed(env, split)
        few = f"env.train.task_weights has {given} weights for {wanted} tasks; set one weight for each task."
        return [few] if given not in (0, wanted) else []
    given = {"algorithm.curriculum": cfg.algorithm.curriculum, "env.train.task_weights": split.task_weights}
    return [
        f"{key} weights initial states, but slots choose initial states freely; set "
        f"env.train.use_fixed_reset_state_ids=true and env.train.continue_episodes=false, or remove {key}."
        for key, value in given.items()
        if value
    ]
