"""Checks that an environment implements Gymnasium's interface; each error message includes the fix."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import VectorEnv

from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import BoolArray

_OLD_API_FIX = (
    "This is the API before Gymnasium 0.26. Fix: change reset to accept (seed, options) and return (observation, info) "
    "and step to return (observation, reward, terminated, truncated, info), where truncated is the time limit. Or "
    "pip install shimmy and set env.id to a function that returns shimmy.GymV21CompatibilityV0(env=...)."
)


def require_env(env_id: str, value: Any) -> Any:
    """Return `value` if it is a Gymnasium environment or environment class.

    Raises:
        ConfigError: `value` has another type; the message explains the conversion.
    """
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    if issubclass(classes[0], (gymnasium.Env, VectorEnv)):
        return value
    description = (
        f"env.id={env_id} is {classes[0].__module__}.{classes[0].__qualname__}, which is not a Gymnasium environment"
    )
    if value is None:
        problem = f"env.id={env_id}: the function returned None. Fix: end the function with `return env`."
    elif hasattr(value, "possible_agents") or any(cls.__module__.startswith("pettingzoo") for cls in classes):
        problem = (
            f"{description}: a PettingZoo environment has several agents, but a run trains one policy. Fix: write a "
            f"gymnasium.Env for one agent that controls the other agents itself."
        )
    elif any(cls.__module__.partition(".")[0] == "gym" for cls in classes):
        problem = f"{description}: it is an environment of the old package gym. {_OLD_API_FIX}"
    elif hasattr(value, "action_spec") and hasattr(value, "observation_spec"):
        problem = (
            f"{description} but a dm_env environment. Fix: pip install shimmy, then write a function that returns "
            "shimmy.DmControlCompatibilityV0(env)."
        )
    else:
        old_api_fix = f" {_OLD_API_FIX}" if _uses_old_api(classes[0]) else ""
        problem = f"{description}. Fix: derive it from gymnasium.Env.{old_api_fix}"
    raise ConfigError(problem)


def _uses_old_api(cls: type) -> bool:
    """Return True if `reset` of the class accepts no seed, as in the API before Gymnasium 0.26."""
    try:
        parameters = inspect.signature(cls.reset).parameters  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return False
    takes_any_keyword = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return hasattr(cls, "step") and "seed" not in parameters and not takes_any_keyword


def require_spaces(env_id: str, env: Any) -> None:
    """Raise ConfigError if the environment has no observation_space or action_space."""
    names = ("single_observation_space", "single_action_space")
    for name in names if isinstance(env, VectorEnv) else ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            raise ConfigError(
                f"env.id={env_id}: {name} is {space!r:.80}, expected a gymnasium.spaces object. Fix: set "
                f"self.{name} in __init__."
            )


def reset_env(env_id: str, env: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Reset the environment; return (observation, info).

    Raises:
        EnvError: `reset` accepts no seed, or returns something else.
    """
    try:
        result = env.reset(**options)
    except TypeError as error:
        # An error raised deeper is a bug of the environment, not of this call.
        if "unexpected keyword argument 'seed'" not in str(error) or len(traceback.extract_tb(error.__traceback__)) > 8:
            raise
        raise EnvError(f"env '{env_id}': reset does not accept a seed. {_OLD_API_FIX}") from error
    if _get_length(result) != 2 or not isinstance(result[1], dict):
        is_pair = isinstance(result, tuple) and len(result) == 2
        fix = "Fix: return info={} if there is no information." if is_pair else _OLD_API_FIX
        raise EnvError(
            f"env '{env_id}': reset returned {_describe_values(result)}, expected (observation, info). {fix}"
        )
    return result[0], result[1]


def begin_episode(env_id: str, env: gymnasium.Env[Any, Any], seed: int) -> tuple[Any, dict[str, Any]]:
    """Start the episode with the given seed; return (observation, info).

    Raises:
        EnvError: see `reset_env`.
    """
    with contextlib.suppress(AttributeError):  # some environments have a read-only generator
        # Some wrappers sample a task or an initial state before they pass the seed to the environment.
        if isinstance(env.unwrapped.np_random, np.random.Generator):  # not RandomState
            env.unwrapped.np_random = seeding.np_random(seed)[0]
    return reset_env(env_id, env, seed=seed)


def require_step(env_id: str, result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Return the result of `step`; raise EnvError unless the result has five values and the last is a dict.

    >>> require_step("mine", ([0.0], 1.0, False, False, {}))[1]
    1.0
    """
    if _get_length(result) == 5 and isinstance(result[4], dict):
        return tuple(result)
    expected = "expected (observation, reward, terminated, truncated, info)"
    raise EnvError(
        f"env '{env_id}': step returned {_describe_values(result)}, {expected}."
        + {4: f" {_OLD_API_FIX}", 5: " Fix: return info={} if there is no information."}.get(_get_length(result), "")
    )


def to_float(env_id: str, reward: Any) -> float:
    """Convert a reward (a number, or an array of one element) to float; raise EnvError for other values."""
    try:
        return float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvError(
            f"env '{env_id}': step returned the reward {reward!r:.80}, expected a number. Fix: return one number, or "
            "compute it in a wrapper in env.wrappers (several rewards: gymnasium.wrappers.TransformReward)."
        ) from error


def to_bool(env_id: str, name: str, value: Any) -> bool:
    """Convert a termination or success flag (a bool, 0, 1, or an array of one element) to bool, or raise EnvError."""
    if value is True or value is False:
        return value
    return bool(to_bool_array(env_id, name, np.reshape(value, -1) if np.size(value) == 1 else value, 1)[0])


def to_bool_array(env_id: str, name: str, values: Any, count: int) -> BoolArray:
    """Convert termination or success flags of a batch of environments to booleans [count].

    Raises:
        EnvError: a value is neither true nor false, for example a progress of 0.5.
    """
    array = np.asarray(values)
    array = array[:, 0] if array.shape == (count, 1) else array
    dtype_kind = array.dtype.kind if array.shape in ((), (count,)) else ""
    if dtype_kind == "b" or (dtype_kind and dtype_kind in "iuf" and np.isin(array, (0, 1)).all()):
        return np.broadcast_to(array, count).astype(np.bool_)
    reported = array.reshape(-1).tolist()[0] if array.size == 1 else values
    raise EnvError(
        f"env '{env_id}': step returned {reported!r:.80} for {name}, expected True or False. Fix: return one bool, "
        f"for example bool(distance < 0.05)."
    )


def _get_length(result: Any) -> int:
    return len(result) if isinstance(result, (tuple, list)) else 0


def _describe_values(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"{len(result)} values ({', '.join(type(part).__name__ for part in result)})"
    return "nothing" if result is None else f"one {type(result).__name__}"
