"""A small goal environment with the GoalEnv interface of Gymnasium-Robotics: push a point to its goal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

NEAR = 0.15
"""Distance within which the goal is reached."""
LENGTH = 7
"""Env steps of an episode that does not terminate."""


class Walk(gymnasium.Env[Any, Any]):
    """State: position [2], then two unused numbers; an action moves the point by a tenth of its value."""

    def __init__(self, ends: bool = False) -> None:
        box = spaces.Box(-10.0, 10.0, (2,), np.float64)
        self.observation_space = spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.ends, self.at, self.goal, self.steps = ends, np.zeros(2), np.zeros(2), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at, self.goal, self.steps = *self.np_random.uniform(-0.2, 0.2, (2, 2)), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.at = self.at + 0.1 * np.asarray(action, np.float64)
        self.steps += 1
        reward = float(self.compute_reward(self.at, self.goal, {"bonus": 0.0}))
        return self._seen(), reward, self.ends and reward == 0.0, self.steps == LENGTH, {"is_success": reward == 0.0}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > NEAR).astype(np.float32)

    def _seen(self) -> dict[str, Any]:
        other = self.np_random.uniform(-1.0, 1.0, 2)
        return {"observation": other, "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}


class Started(Walk):
    """Environment whose reset info contains success, which is true in some episodes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seen, _ = super().reset(seed=seed)
        return seen, {"is_success": bool(np.linalg.norm(self.at - self.goal) <= NEAR)}


def started_vector(num_envs: int, **_: Any) -> Any:
    return gymnasium.vector.SyncVectorEnv([Started] * num_envs)


class Ending(Walk):
    """Environment with `compute_terminated` for single goals."""

    def __init__(self) -> None:
        super().__init__(ends=True)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= NEAR)


class OneByOne(Walk):
    """Environment whose `compute_reward` takes a batch for one goal and returns one number."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -float(np.linalg.norm(achieved_goal - desired_goal) > NEAR)


class Otherwise(Walk):
    """Environment whose step rewards differ from `compute_reward`."""

    def step(self, action: Any) -> Any:
        seen, reward, *rest = super().step(action)
        return seen, reward + 0.5, *rest


class Drifts(Walk):
    """Environment whose first reward equals `compute_reward`, later rewards are lower."""

    def step(self, action: Any) -> Any:
        seen, reward, *rest = super().step(action)
        return seen, reward - 0.5 * (self.steps > 3), *rest


class Told(Walk):
    """Environment whose `compute_reward` uses values that only its steps compute."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return super().compute_reward(achieved_goal, desired_goal, info) + info["bonus"]


def careful(step: Any) -> float:
    """Return a user-defined reward."""
    return -float(np.abs(step.action).sum())
