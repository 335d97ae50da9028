"""Rewards for relabelled goals in goal environments (GoalEnv of Gymnasium-Robotics)."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs.gym.api import line
from embodyrl.envs.gym.spaces import ACHIEVED, DESIRED
from embodyrl.errors import EnvError
from embodyrl.types import BoolArray, FloatArray

_REWARD, _TERMINATED = "compute_reward", "compute_terminated"


class GymGoals:
    """Computes rewards and terminations for relabelled goals with the methods of a GoalEnv.

    The methods receive goals in the shape and dtype of the goal space.
    """

    @staticmethod
    def applies(env: gymnasium.Env[Any, Any], seen: Any, reward: Any) -> bool:
        """Return True if `compute_reward`, called with observation `seen` and an empty info, reproduces `reward`."""
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
                bool(env.get_wrapper_attr(_TERMINATED)(seen[ACHIEVED], seen[DESIRED], {}))
            found = env.get_wrapper_attr(_REWARD)(seen[ACHIEVED], seen[DESIRED], {})
            return bool(np.isclose(float(found), float(reward), rtol=1e-4, atol=1e-6))
        except Exception:  # the error is reported if goals are used
            return False

    def __init__(self, env_id: str, env: gymnasium.Env[Any, Any]) -> None:
        assert isinstance(env.observation_space, spaces.Dict)
        self._env_id, self._env, self._space = env_id, env, env.observation_space[DESIRED]
        seen, _ = env.reset(seed=0)
        # The goal of the environment and an achieved goal, to detect functions that support batches.
        pair = np.stack([seen[ACHIEVED], seen[ACHIEVED]]), np.stack([seen[DESIRED], seen[ACHIEVED]])
        self._reward = _in_batches(env.get_wrapper_attr(_REWARD), *pair)
        ends = env.get_wrapper_attr(_TERMINATED) if env.has_wrapper_attr(_TERMINATED) else None
        self._terminated = None if ends is None else _in_batches(ends, *pair)

    def __call__(self, achieved: FloatArray, desired: FloatArray) -> tuple[FloatArray, BoolArray | None]:
        """Return rewards [n] and terminations [n] for goals `desired` [n, G] (see `GoalReward`)."""
        shape = (len(achieved), *(self._space.shape or ()))
        goals = [one.astype(self._space.dtype).reshape(shape) for one in (achieved, desired)]
        try:
            reward = self._reward(*goals).astype(np.float32)
            ends = None if self._terminated is None else self._terminated(*goals).astype(np.bool_)
        except Exception as error:
            raise EnvError(
                f"env '{self._env_id}': {_REWARD} or {_TERMINATED} for a relabelled goal raised {line(error)}. "
                "Both methods receive an empty info. Fix: compute the reward without info, or set "
                "algorithm.hindsight_goals=0."
            ) from error
        if not np.isfinite(reward).all():
            raise EnvError(
                f"env '{self._env_id}': {_REWARD} returned {reward!r:.80}, which is not finite. Correct this method."
            )
        return reward, ends

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._env.close()


def _in_batches(function: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray) -> Callable[..., np.ndarray]:
    """Return a batched version of `function`: a single call if `function` supports batches, else a loop.

    The support is tested with the given goals.
    """

    def one_by_one(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.array([function(a, d, {}) for a, d in zip(achieved, desired, strict=True)])

    def at_once(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.asarray(function(achieved, desired, [{}] * len(achieved)))

    expected = one_by_one(achieved, desired)
    try:
        found = at_once(achieved, desired)
        understood = found.shape == expected.shape and np.allclose(found, expected)
    except Exception:  # a function of single goals may raise any error for batches
        understood = False
    return at_once if understood else one_by_one
