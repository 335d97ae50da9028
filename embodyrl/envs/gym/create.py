"""Constructs Gymnasium environments from the config; what goes wrong becomes an error with a fix."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from embodyrl.envs.gym.settings import GymSettings
from embodyrl.errors import ConfigError, EmbodyError, MissingDependencyError, UnknownNameError
from embodyrl.registry import Registry, closest, takes

AnyEnv = gymnasium.Env[Any, Any]
_GYM = (gymnasium.Env, VectorEnv)
"""Wrappers are environments too."""

CREATORS: Registry[Callable[..., AnyEnv]] = Registry(
    "env.id",
    group="embodyrl.gym_envs",
    wants="a Gymnasium environment, or a function of yours that returns one",
    fits=lambda found: issubclass(found, _GYM) if isinstance(found, type) else takes(0)(found),
)
WRAPPERS: Registry[Callable[[AnyEnv], AnyEnv]] = Registry(
    "wrapper",
    group="embodyrl.gym_wrappers",
    wants="a Gymnasium wrapper, or a function of yours from environment to environment",
    fits=lambda found: issubclass(found, _GYM) if isinstance(found, type) else takes(0)(found),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one instance of the environment says about itself."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    max_episode_steps: int
    """The environment's own time limit, env steps; 0: none known."""
    kwargs: dict[str, Any]
    """Arguments of its constructor: `env.kwargs`, and a render mode to look at where it has one."""
    reports_success: bool
    """The `info` of its first step says something of success."""
    vector: bool
    """It is a `gymnasium.vector.VectorEnv`, one for all slots; the spaces are those of one slot."""


def probe(cfg: GymSettings) -> Probe:
    """Build the environment, read what it declares, and close it again.

    Raises:
        EmbodyError: see `create`.
    """
    kwargs = dict(cfg.kwargs)
    env = create(cfg, kwargs)
    try:
        vector = isinstance(env, VectorEnv)
        if vector and (env.metadata or {}).get("autoreset_mode") is not AutoresetMode.DISABLED:
            raise ConfigError(
                f"env.id={cfg.id} is a vector environment that resets by itself, so nobody could choose its episodes; "
                "build it with autoreset_mode=AutoresetMode.DISABLED and let reset take options={'reset_mask': ...}."
            )
        modes: Iterable[str] = (env.metadata or {}).get("render_modes") or ()
        if not vector and env.render_mode is None and "render_mode" not in kwargs and "rgb_array" in modes:
            kwargs["render_mode"] = "rgb_array"
        return Probe(
            observation_space=env.single_observation_space if vector else env.observation_space,
            action_space=env.single_action_space if vector else env.action_space,
            max_episode_steps=(env.spec.max_episode_steps or 0) if env.spec is not None else 0,
            kwargs=kwargs,
            reports_success=_reports_success(env),
            vector=vector,
        )
    finally:
        env.close()


def _reports_success(env: Any) -> bool:
    env.reset(seed=0)
    env.action_space.seed(0)
    return not {"success", "is_success"}.isdisjoint(env.step(env.action_space.sample())[4])


def create(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int = 1) -> Any:
    """Build one environment, or a native vector environment of `num_envs`, with its wrappers.

    Raises:
        UnknownNameError: no environment or wrapper has this name.
        MissingDependencyError: a package that it needs is not installed.
        ConfigError: the constructor or a wrapper refuses its arguments.
    """
    env = _construct(cfg, kwargs, num_envs)
    for name in cfg.wrappers:
        try:
            env = WRAPPERS.get(name)(env)
        except (TypeError, ValueError, AssertionError) as error:
            if isinstance(error, EmbodyError):
                raise
            raise ConfigError(
                f"env.wrappers: '{name}' cannot wrap env.id={cfg.id}: {_line(error)}. A wrapper is called with the "
                "environment alone; give its settings in a function of your own."
            ) from error
    return env


def _construct(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int) -> Any:
    assert cfg.id is not None
    try:
        if _is_path(cfg.id):
            creator = CREATORS.get(cfg.id)
            batched = isinstance(creator, type) and issubclass(creator, VectorEnv)
            return creator(**{"num_envs": num_envs} if batched else {}, **kwargs)
        module, _, name = cfg.id.rpartition(":")
        if module:
            importlib.import_module(module)
        spec = gymnasium.registry.get(name)
        if spec is not None and spec.entry_point is None:
            return gymnasium.make_vec(cfg.id, num_envs, vectorization_mode="vector_entry_point", **kwargs)
        return gymnasium.make(cfg.id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise MissingDependencyError(
            f"env.id={cfg.id} needs a package that is not installed: {_line(error)}."
        ) from error
    except gymnasium.error.UnregisteredEnv as error:
        hint = closest(cfg.id, gymnasium.registry.keys())
        reason = _line(error).partition(" Did you mean")[0]  # the hint names the version too
        raise UnknownNameError(
            f"env.id={cfg.id}: {reason.rstrip('.')}.{hint} An id that another package registers is written "
            f"package:Id-v0; your own class package.module:Class."
        ) from error
    except (gymnasium.error.Error, TypeError, ValueError) as error:
        if isinstance(error, EmbodyError):
            raise
        raise ConfigError(
            f"env.id={cfg.id} cannot be built with env.kwargs={kwargs}: {_line(error)}. Compare env.kwargs with the "
            "arguments of its constructor."
        ) from error


def _is_path(name: str) -> bool:
    """package.module:attr, other than the package:Id-v0 that Gymnasium knows itself."""
    return ":" in name and re.fullmatch(r"[A-Za-z_][\w.]*", name.partition(":")[2]) is not None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
