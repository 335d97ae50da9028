"""Hindsight experience replay (HER, arXiv 1707.01495): transitions are relabeled with goals achieved later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np

from embodyrl.algorithms.off_policy.estimator import ReplaySettings
from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer, Transitions
from embodyrl.channels.layout import Record
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import GoalFactory
from embodyrl.envs.settings import EnvSettings
from embodyrl.types import EnvSpec, FloatArray, IntArray


class Hindsight:
    """Relabeling of sampled transitions with achieved goals, for which the environment computes the rewards."""

    def __init__(self, settings: ReplaySettings, cfg: EnvSettings, env: EnvSpec) -> None:
        assert env.goal is not None, "checked by the run plan"
        self._goal_rewards = cast(GoalFactory[EnvSettings], ENVS.get(cfg.env_type)).make_goal_reward(cfg)
        self._relabel_fraction = settings.hindsight_goals / (settings.hindsight_goals + 1)
        self._gamma, self._n_step = settings.gamma, settings.n_step
        self._factor = settings.reward_scale * env.reward.factor
        self._achieved, self.desired = slice(*env.goal.achieved), slice(*env.goal.desired)

    def relabel(self, transitions: Transitions, rng: np.random.Generator) -> Transitions:
        """Relabel random transitions with goals that are achieved later in the same episode.

        A fraction `hindsight_goals` / (`hindsight_goals` + 1) of the transitions is relabeled. The new reward is the
        sum of gamma^j R(achieved after chunk j, goal), over n chunks or until the new goal terminates the episode.
        Transitions without a later observation keep their goal.
        """
        buffer = transitions.buffer
        relabeled = np.flatnonzero(
            (rng.random(len(transitions.indices)) < self._relabel_fraction) & (buffer["left"][transitions.indices] > 0)
        )
        if not len(relabeled):
            return transitions
        starts = transitions.indices[relabeled, None]
        num_later = buffer["left"][starts]
        goal = self._get_achieved_goals(buffer, buffer.get_later_indices(starts, rng.integers(1, num_later + 1)))[:, 0]
        steps = np.arange(1, self._n_step + 1)
        ends = buffer.get_later_indices(starts, np.minimum(steps, num_later))
        goals = np.repeat(goal, len(steps), axis=0)
        rewards, terminated = self._goal_rewards(self._get_achieved_goals(buffer, ends).reshape(goals.shape), goals)
        before = buffer.get_later_indices(starts, np.minimum(steps, num_later) - 1)
        if terminated is None:
            # Terminations do not depend on the goal, so the terminations of single-chunk transitions are used.
            terminated = (buffer["discount"][before] == 0) & (buffer["ahead"][before] == 1)
        terminated = terminated.reshape(ends.shape)
        counts = (steps <= num_later) & (np.cumsum(terminated, axis=1) - terminated == 0)
        length = counts.sum(axis=1)
        reward, discount = transitions.reward.copy(), transitions.discount.copy()
        after = transitions.after.copy()
        credit = np.where(counts, self._gamma ** (steps - 1.0), 0.0) * rewards.reshape(ends.shape)
        reward[relabeled] = self._factor * credit.sum(axis=1)
        discount[relabeled] = np.where((terminated & counts).any(axis=1), 0.0, self._gamma**length)
        after[relabeled] = buffer.get_later_indices(transitions.indices[relabeled], length)
        return replace(transitions, reward=reward, discount=discount, after=after, relabeled=relabeled, goal=goal)

    def _get_achieved_goals(self, buffer: ReplayBuffer, indices: IntArray) -> FloatArray:
        return buffer[Record.observed_state][indices][..., self._achieved]

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._goal_rewards.close()


class UnfinishedEpisodes:
    """Frames of unfinished episodes, which continue in the next training step."""

    def __init__(self) -> None:
        self._unfinished: dict[int, Frames] = {}

    def append_frames(self, new: Frames, earlier: Mapping[int, int], continuing: Mapping[int, int]) -> list[Frames]:
        """Append new frames to the stored frames of their episodes; return the complete episodes.

        Args:
            new: frames of some episodes.
            earlier: key of the stored frames, by number of the continued episode in `new`.
            continuing: key under which to store the frames of an unfinished episode, by episode number in `new`.
        """
        unfinished, self._unfinished = self._unfinished, {}
        complete: list[Frames] = []
        last = np.flatnonzero(np.append(new.episode[1:] != new.episode[:-1], True)) + 1
        for start, stop in zip([0, *last[:-1].tolist()], last.tolist(), strict=True):
            part, number = new.map(lambda array, own=slice(start, stop): array[own]), int(new.episode[start])
            if (stored := unfinished.pop(earlier.get(number, -1), None)) is not None:
                # The last stored frame equals the first new frame and is kept once.
                part = join_frames([stored.map(lambda array: array[:-1]), part])
            if number in continuing:
                self._unfinished[continuing[number]] = part
            else:
                complete.append(part)
        return [*unfinished.values(), *complete]

    def state(self) -> dict[str, Any]:
        """Return the frames of unfinished episodes for a checkpoint; a resumed run does not continue these episodes."""
        unfinished = enumerate(self._unfinished.values())
        renumbered = [replace(frames, episode=np.full_like(frames.episode, i)) for i, frames in unfinished]
        joined = join_frames(renumbered, single_episode=False) if renumbered else None
        return {item.name: getattr(joined, item.name) for item in fields(Frames)} if joined else {}


def join_frames(parts: Sequence[Frames], *, single_episode: bool = True) -> Frames:
    """Concatenate frames. If `single_episode`, set the episode number of all frames to 0."""
    names = [item.name for item in fields(Frames) if item.name != "seen"]
    seen = {name: np.concatenate([part.seen[name] for part in parts]) for name in parts[0].seen}
    joined = Frames(seen=seen, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
    return replace(joined, episode=np.zeros_like(joined.episode)) if single_episode else joined
