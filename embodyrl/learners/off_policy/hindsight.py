"""Hindsight experience replay (HER, arXiv 1707.01495): transitions are relabelled with goals achieved later."""

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
    """Relabels sampled transitions with achieved goals; the environment computes the rewards for these goals."""

    def __init__(self, rules: ReplaySettings, cfg: EnvSettings, env: EnvSpec) -> None:
        assert env.goal is not None, "checked by the run plan"
        self._judge = cast(GoalFactory[EnvSettings], ENVS.get(cfg.env_type)).judge(cfg)
        self._share = rules.hindsight_goals / (rules.hindsight_goals + 1)
        self._gamma, self._n_step = rules.gamma, rules.n_step
        self._factor = rules.reward_scale * env.reward.factor
        self._achieved, self.desired = slice(*env.goal.achieved), slice(*env.goal.desired)

    def relabel(self, drawn: Transitions, rng: np.random.Generator) -> Transitions:
        """Relabel random transitions with goals that are achieved later in the same episode.

        A fraction `hindsight_goals` / (`hindsight_goals` + 1) of the transitions is relabelled. The new reward is the
        sum of gamma^j R(achieved after chunk j, goal), over n chunks or until the new goal terminates the episode.
        Transitions without a later observation keep their goal.
        """
        buffer = drawn.buffer
        moved = np.flatnonzero((rng.random(len(drawn.places)) < self._share) & (buffer["left"][drawn.places] > 0))
        if not len(moved):
            return drawn
        begin = drawn.places[moved, None]
        left = buffer["left"][begin]
        goal = self._reached(buffer, buffer.later(begin, rng.integers(1, left + 1)))[:, 0]
        steps = np.arange(1, self._n_step + 1)
        ends = buffer.later(begin, np.minimum(steps, left))
        wanted = np.repeat(goal, len(steps), axis=0)
        earned, over = self._judge(self._reached(buffer, ends).reshape(wanted.shape), wanted)
        before = buffer.later(begin, np.minimum(steps, left) - 1)
        if over is None:
            # Terminations do not depend on the goal: use those of single-chunk transitions.
            over = (buffer["discount"][before] == 0) & (buffer["ahead"][before] == 1)
        over = over.reshape(ends.shape)
        counts = (steps <= left) & (np.cumsum(over, axis=1) - over == 0)
        length = counts.sum(axis=1)
        reward, discount = drawn.reward.copy(), drawn.discount.copy()
        after = drawn.after.copy()
        credit = np.where(counts, self._gamma ** (steps - 1.0), 0.0) * earned.reshape(ends.shape)
        reward[moved] = self._factor * credit.sum(axis=1)
        discount[moved] = np.where((over & counts).any(axis=1), 0.0, self._gamma**length)
        after[moved] = buffer.later(drawn.places[moved], length)
        return replace(drawn, reward=reward, discount=discount, after=after, moved=moved, goal=goal)

    def _reached(self, buffer: ReplayBuffer, places: IntArray) -> FloatArray:
        return buffer[Record.observed_state][places][..., self._achieved]

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._judge.close()


class OpenEpisodes:
    """Frames of unfinished episodes, which continue in the next training step."""

    def __init__(self) -> None:
        self._held: dict[int, list[Frames]] = {}

    def whole(self, new: Frames, earlier: Mapping[int, int], going_on: Mapping[int, int]) -> list[Frames]:
        """Append new frames to the stored frames of their episodes; return the complete episodes.

        Args:
            new: frames of some episodes.
            earlier: key of the stored frames, by number of the continued episode in `new`.
            going_on: key under which to store the frames of an unfinished episode, by episode number in `new`.
        """
        held, self._held = self._held, {}
        found: list[Frames] = []
        last = np.flatnonzero(np.append(new.episode[1:] != new.episode[:-1], True)) + 1
        for start, stop in zip([0, *last[:-1].tolist()], last.tolist(), strict=True):
            part, number = new.map(lambda array, own=slice(start, stop): array[own]), int(new.episode[start])
            parts = held.pop(earlier.get(number, -1), [])
            # The last held frame is the first new frame: keep it once.
            parts[-1:] = [before.map(lambda array: array[:-1]) for before in parts[-1:]]
            parts.append(part)
            if number in going_on:
                self._held[going_on[number]] = parts
            else:
                found.append(join(parts))
        return [*map(join, held.values()), *found]

    def state(self) -> dict[str, Any]:
        """Return the frames of unfinished episodes for a checkpoint; a resumed run does not continue these episodes."""
        held = [join(parts) for parts in self._held.values()]
        numbered = [replace(whole, episode=np.full_like(whole.episode, i)) for i, whole in enumerate(held)]
        whole = join(numbered, one=False) if held else None
        return {item.name: getattr(whole, item.name) for item in fields(Frames)} if whole else {}


def join(parts: Sequence[Frames], *, one: bool = True) -> Frames:
    """Concatenate frames; `one`: set the episode number of all frames to 0."""
    names = [item.name for item in fields(Frames) if item.name != "seen"]
    seen = {name: np.concatenate([part.seen[name] for part in parts]) for name in parts[0].seen}
    joined = Frames(seen=seen, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
    return replace(joined, episode=np.zeros_like(joined.episode)) if one else joined
