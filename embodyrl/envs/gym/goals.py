"""Rewards for relabeled goals in goal environments (GoalEnv of Gymnasium-Robotics)."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs.gym.spaces import ACHIEVED, DESIRED
from embodyrl.errors import EnvError, format_error
from embodyrl.types import BoolArray, FloatArray

_REWARD, _TERMINATED = "compute_reward", "compute_terminated"


class GymGoalReward:
    """Reward function for relabeled goals (`GoalReward`) that calls the methods of a GoalEnv.

    The methods receive goals in the shape and dtype of the goal space.
    """

    @staticmethod
    def can_recompute_reward(env: gymnasium.Env[Any, Any], observation: Any, reward: Any) -> bool:
        """Return True if `compute_reward`, called with `observation` and an empty info, reproduces `reward`."""
        space = env.observation_space
        if not isinstance(space, spaces.Dict) or not env.has_wrapper_attr(_REWARD):
            return False
        achieved, desired = (space.spaces.get(name) for name in (ACHIEVED, DESIRED))
        if (
            not isinstance(achieved, spaces.Box)
            or not isinstance(desired, spaces.Box)
            or achieved.shape != desired.shape
        ):
            return False
        try:
            if env.has_wrapper_attr(_TERMINATED):
                bool(env.get_wrapper_attr(_TERMINATED)(observation[ACHIEVED], observation[DESIRED], {}))
            computed = env.get_wrapper_attr(_REWARD)(observation[ACHIEVED], observation[DESIRED], {})
            return bool(np.isclose(float(computed), float(reward), rtol=1e-4, atol=1e-6))
        except Exception:  # the error is reported if goals are used
            return False

    def __init__(self, env_id: str, env: gymnasium.Env[Any, Any]) -> None:
        assert isinstance(env.observation_space, spaces.Dict)
        self._env_id, self._env, self._space = env_id, env, env.observation_space[DESIRED]
        observation, _ = env.reset(seed=0)
        # The goal of the environment and an achieved goal, to detect functions that support batches.
        goals = (
            np.stack([observation[ACHIEVED], observation[ACHIEVED]]),
            np.stack([observation[DESIRED], observation[ACHIEVED]]),
        )
        self._reward = _batch_function(env.get_wrapper_attr(_REWARD), *goals)
        terminated = env.get_wrapper_attr(_TERMINATED) if env.has_wrapper_attr(_TERMINATED) else None
        self._terminated = None if terminated is None else _batch_function(terminated, *goals)

    def __call__(self, achieved: FloatArray, desired: FloatArray) -> tuple[FloatArray, BoolArray | None]:
        """Return rewards [n] and terminations [n] for goals `desired` [n, G] (see `GoalReward`)."""
        shape = (len(achieved), *(self._space.shape or ()))
        goals = [goal.astype(self._space.dtype).reshape(shape) for goal in (achieved, desired)]
        try:
            reward = self._reward(*goals).astype(np.float32)
            terminated = None if self._terminated is None else self._terminated(*goals).astype(np.bool_)
        except Exception as error:
            raise EnvError(
                f"env '{self._env_id}': {_REWARD} or {_TERMINATED} for a relabeled goal raised {format_error(error)}. "
                "Both methods receive an empty info. Fix: compute the reward without info, or set "
                "algorithm.hindsight_goals=0."
            ) from error
        if not np.isfinite(reward).all():
            raise EnvError(
                f"env '{self._env_id}': {_REWARD} returned {reward!r:.80}, which is not finite. Correct this method."
            )
        return reward, terminated

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._env.close()


def _batch_function(
    function: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray
) -> Callable[..., np.ndarray]:
    """Return a batched version of `function`: a single call if `function` supports batches, else a loop.

    The goals `achieved` and `desired` [2, ...] are used to test whether `function` supports batches.
    """

    def call_each(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.array(
            [
                function(achieved_goal, desired_goal, {})
                for achieved_goal, desired_goal in zip(achieved, desired, strict=True)
            ]
        )

    def call_batch(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.asarray(function(achieved, desired, [{}] * len(achieved)))

    expected = call_each(achieved, desired)
    try:
        batched = call_batch(achieved, desired)
        supports_batches = batched.shape == expected.shape and np.allclose(batched, expected)
    except Exception:  # a function of single goals may raise any error for batches
        supports_batches = False
    return call_batch if supports_batches else call_each
