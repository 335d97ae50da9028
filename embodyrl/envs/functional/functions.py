"""Common interface for environments of gymnax, Brax, MuJoCo Playground and user code.

Brax and MuJoCo Playground: `reset(key) -> state` and `step(state, action) -> state`; a state has `obs`, `reward` and
`done`. gymnax: `reset_env(key, params)` and `step_env(key, state, action, params)`.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.functional.settings import FunctionalSettings
from embodyrl.errors import ConfigError, MissingDependencyError
from embodyrl.types import ActionKind, ActionSpec

_LIBRARIES = {
    "gymnax": ("gymnax", "gymnax", "make"),
    "brax": ("brax", "brax.envs", "get_environment"),
    "playground": ("playground", "mujoco_playground", "registry.load"),
}
"""Package on PyPI, module, and function of the environment's name, of each library."""

Array = Any
"""Alias of `jax.Array`, typed as Any because type checkers run without JAX."""


class StepResult(NamedTuple):
    """Result of a reset or a step, of one environment or (with a leading batch axis) of a batch."""

    carry: Any
    """State of the environment, a pytree."""
    obs: Array
    """Observation [S], float32."""
    reward: Array
    terminated: Array
    truncated: Array
    success: Array


class Functions(Protocol):
    """Interface of an environment as pure functions."""

    action: ActionSpec
    horizon: int
    """Time limit in env steps; 0: unknown."""
    info_keys: tuple[str, ...]
    """Keys of info and metrics; empty before `step` is called or traced."""

    def reset(self, key: Array) -> StepResult:
        """Reset the environment with a random key."""
        ...

    def step(self, carry: Any, action: Array, key: Array) -> StepResult:
        """Execute one action; `key` is the random key of the step."""
        ...


def load(cfg: FunctionalSettings) -> Functions:
    """Build the environment of `env.id` as pure functions.

    Raises:
        MissingDependencyError: a package is missing.
        ConfigError: the environment is unknown, rejects its arguments, or has an unsupported interface.
    """
    library, _, name = str(cfg.id).partition(":")
    if library in _LIBRARIES:
        package, module, function = _LIBRARIES[library]
        arguments = [name]
    else:
        package, module, function, arguments = library.partition(".")[0], library, name, []
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingDependencyError(f"env.id={cfg.id} needs the package {package}. Fix: pip install {package}.")
    try:
        environment = attrgetter(function)(importlib.import_module(module))(*arguments, **cfg.kwargs)
        env, params = environment if isinstance(environment, tuple) else (environment, None)
        if hasattr(env, "step_env"):
            return _GymnaxEnvironment(env, env.default_params if params is None else params, cfg.success_key)
        return _BraxEnvironment(env, cfg.success_key)
    except ImportError as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        fix = f"pip install {missing.partition('.')[0]}" if missing else f"check the installation of {package}"
        raise MissingDependencyError(f"env.id={cfg.id}: {package} cannot be imported: {error}. Fix: {fix}.") from error
    except Exception as error:
        raise ConfigError(
            f"env.id={cfg.id} cannot be built with env.kwargs={cfg.kwargs}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Expected a function that returns an environment with reset(key) and "
            "step(state, action)."
        ) from error


class _GymnaxEnvironment:
    """Adapter of a gymnax environment."""

    def __init__(self, env: Any, params: Any, success_key: str | None) -> None:
        self._env, self._params, self._key = env, params, success_key
        self.horizon = int(params.max_steps_in_episode)
        # `done` includes the time limit; without the limit only the end of the task is left.
        self._params_without_limit = params.replace(max_steps_in_episode=2**30)
        self.action = _convert_action_space(env.action_space(params))
        self.info_keys = ()

    def reset(self, key: Array) -> StepResult:
        obs, state = self._env.reset_env(key, self._params)
        return _build_result(state, obs, 0.0, False, False, False)

    def step(self, carry: Any, action: Array, key: Array) -> StepResult:
        obs, state, reward, done, info = self._env.step_env(key, carry, action, self._params)
        self.info_keys = tuple(map(str, info))
        ended = done & self._env.is_terminal(state, self._params_without_limit)
        return _build_result(state, obs, reward, ended, done & ~ended, _read_success(info, self._key))


class _BraxEnvironment:
    """Adapter of an environment with the interface of Brax and MuJoCo Playground."""

    def __init__(self, env: Any, success_key: str | None) -> None:
        self._env, self._key = env, success_key
        limit = getattr(getattr(env, "config", None), "episode_length", 0) or getattr(env, "episode_length", 0)
        self.horizon = int(limit)
        size, space = getattr(env, "action_size", None), getattr(env, "action_space", None)
        self.action = ActionSpec(dim=int(size)) if size is not None else _convert_action_space(space)
        self.info_keys = ()

    def reset(self, key: Array) -> StepResult:
        return self._read_state(self._env.reset(key))

    def step(self, carry: Any, action: Array, key: Array) -> StepResult:
        return self._read_state(self._env.step(carry, action))

    def _read_state(self, state: Any) -> StepResult:
        info = {**(getattr(state, "info", None) or {}), **(getattr(state, "metrics", None) or {})}
        self.info_keys = tuple(map(str, info))
        return _build_result(state, state.obs, state.reward, state.done, False, _read_success(info, self._key))


def _build_result(carry: Any, obs: Any, reward: Any, terminated: Any, truncated: Any, success: Any) -> StepResult:
    if isinstance(obs, Mapping):
        raise ConfigError(
            f"env.id: the environment returns a dict of observations ({', '.join(obs)}), expected one array. "
            "Set env.id to a function that returns the environment with a wrapper that concatenates the arrays."
        )
    flags = [jnp.asarray(flag).astype(jnp.bool_).reshape(()) for flag in (terminated, truncated, success)]
    scalar_reward = jnp.asarray(reward, jnp.float32).reshape(())
    return StepResult(carry, jnp.asarray(obs, jnp.float32).reshape(-1), scalar_reward, *flags)


def _read_success(info: Mapping[str, Any], key: str | None) -> Any:
    return False if key is None or key not in info else jnp.asarray(info[key]) > 0


def _convert_action_space(space: Any) -> ActionSpec:
    """Convert a Discrete or Box action space of gymnax or Gymnasium to an ActionSpec."""
    if hasattr(space, "n"):
        return ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(int(space.n),))
    low, high = (
        np.broadcast_to(np.asarray(bound, np.float64), space.shape).reshape(-1) for bound in (space.low, space.high)
    )
    return ActionSpec(dim=len(low), low=tuple(low.tolist()), high=tuple(high.tolist()))
