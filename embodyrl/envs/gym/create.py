"""Constructs Gymnasium environments from the config; what goes wrong becomes an error with a fix."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from embodyrl.envs.gym.api import line, require_env, require_spaces, require_step, reset_env
from embodyrl.envs.gym.goals import has_goals
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import doubts
from embodyrl.envs.renderer import choose_device, choose_renderer
from embodyrl.errors import ConfigError, EmbodyError, EnvError, MissingDependencyError, UnknownNameError, one_line
from embodyrl.registry import Registry, closest, takes

AnyEnv = gymnasium.Env[Any, Any]

CREATORS: Registry[Callable[..., AnyEnv]] = Registry(
    "env.id",
    group="embodyrl.gym_envs",
    wants="a Gymnasium environment, or a function of yours that returns one",
    fits=takes(0),
)
WRAPPERS: Registry[Callable[..., AnyEnv]] = Registry(
    "wrapper",
    group="embodyrl.gym_wrappers",
    wants="a Gymnasium wrapper, or a function of yours from environment to environment",
    # Wrappers are environments too.
    fits=lambda found: issubclass(found, (gymnasium.Env, VectorEnv)) if isinstance(found, type) else takes(0)(found),
)
GL_FIX = (
    "Fix: MUJOCO_GL=osmesa (apt-get install libosmesa6; pip install PyOpenGL) or, with a GPU, MUJOCO_GL=egl "
    "(apt-get install libegl1); or record nothing with video=none."
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
    expert: bool
    """It, or a wrapper of it, has a method `expert_action`."""
    vector: bool
    """It is a `gymnasium.vector.VectorEnv`, one for all slots; the spaces are those of one slot."""
    draws: bool
    """It renders, or would if it was asked to at its start."""
    doubts: tuple[str, ...] = ()
    """See `spaces.doubts`, of what was observed first."""
    goals: bool = False
    """It says what a step would have earned with another goal."""


def probe(cfg: GymSettings, *, pictures: bool = True) -> Probe:
    """Build the environment, read what it declares, and close it again.

    Args:
        cfg: names it.
        pictures: somebody will `render`; without, it is built without a render mode, since some draw in every step.

    Raises:
        EmbodyError: see `create`; or its first steps break Gymnasium's interface.
    """
    kwargs = dict(cfg.kwargs)
    # Two are the fewest that show whether they can be started apart from each other.
    env = create(cfg, kwargs, 2 if _is_vector(cfg) else 1)
    try:
        vector = isinstance(env, VectorEnv)
        modes: Iterable[str] = (env.metadata or {}).get("render_modes") or ()
        if pictures and not vector and env.render_mode is None and "render_mode" not in kwargs and "rgb_array" in modes:
            kwargs["render_mode"] = "rgb_array"
        if kwargs.get("render_mode") is not None:
            _draw_without_display()
        try:
            if vector:
                said: dict[str, Any] = {"reports_success": _try_out_vector(cfg, env)}
            else:
                said = _try_out(cfg, env)
        except EmbodyError:
            raise
        except Exception as error:
            raise EnvError(f"env.id={cfg.id}: its first reset and step ended with {line(error)}.") from error
        return Probe(
            observation_space=env.single_observation_space if vector else env.observation_space,
            action_space=env.single_action_space if vector else env.action_space,
            max_episode_steps=(env.spec.max_episode_steps or 0) if env.spec is not None else 0,
            kwargs=kwargs,
            expert=not vector and env.has_wrapper_attr("expert_action"),
            vector=vector,
            draws="rgb_array" in (env.render_mode, *(modes if env.render_mode is None and not vector else ())),
            **said,
        )
    finally:
        env.close()


def _try_out(cfg: GymSettings, env: AnyEnv) -> dict[str, Any]:
    """Reset and step once; what a `Probe` says of that."""
    first, _ = reset_env(str(cfg.id), env, seed=0)
    found = tuple(doubts(env.observation_space, first))
    env.action_space.seed(0)
    seen, reward, _, _, info = require_step(str(cfg.id), env.step(env.action_space.sample()))
    return {"reports_success": _speaks_of_success(info), "doubts": found, "goals": has_goals(env, seen, reward)}


def _try_out_vector(cfg: GymSettings, env: Any) -> bool:
    """As `_try_out`; the two environments must be started apart from each other, or nobody could choose episodes."""
    env_id = str(cfg.id)
    result: Any = None
    try:
        reset_env(env_id, env, seed=[0, 1])
        env.action_space.seed(0)
        result = require_step(env_id, env.step(env.action_space.sample()))
        moved = _rows(env, result[0])
        seen = reset_env(env_id, env, seed=[7, 8], options={"reset_mask": np.array([False, True])})[0]
        kept = _rows(env, seen)[0] == moved[0]
        problem = "" if kept else "reset with options={'reset_mask': [False, True]} restarted the first one as well"
    except Exception as error:
        problem = f"reset(seed=[...], options={{'reset_mask': ...}}) and step ended with {line(error)}"
    if problem:
        raise ConfigError(
            f"env.id={env_id} is a vector environment whose environments cannot be started one by one, so nobody could "
            f"choose its episodes: {problem}. Fix: let reset take a list of seeds and the reset mask, as Gymnasium's "
            "SyncVectorEnv does, or name the single environment (env.id=CartPole-v1): each slot gets one."
        )
    return _speaks_of_success(result[4])


def _rows(env: Any, batch: Any) -> list[bytes]:
    """What each environment of a batch observes, to compare."""
    rows = gymnasium.vector.utils.iterate(env.observation_space, batch)
    space = env.single_observation_space
    return [np.asarray(gymnasium.spaces.flatten(space, row)).tobytes() for row in rows]


def _speaks_of_success(info: dict[str, Any]) -> bool:
    # Autoreset in the same step moves it to the info of the episode that ended.
    names = {*info, *(final if isinstance(final := info.get("final_info"), dict) else ())}
    return not {"success", "is_success"}.isdisjoint(names)


def create(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int = 1) -> Any:
    """Build one environment, or a native vector environment of `num_envs`, with its wrappers.

    Raises:
        UnknownNameError: no environment or wrapper has this name.
        MissingDependencyError: a package that it needs is not installed.
        ConfigError: the constructor or a wrapper refuses its arguments, or what it makes is no environment.
    """
    env_id = str(cfg.id)
    if kwargs.get("render_mode") is not None:
        _draw_without_display()
    env = require_env(env_id, _construct(cfg, kwargs, num_envs))
    for name, arguments in cfg.wrapped:
        wrapper = WRAPPERS.get(name)
        try:
            env = wrapper(env, **arguments)
        except EmbodyError:
            raise
        except Exception as error:
            given = f" with {arguments}" if arguments else ""
            raise ConfigError(
                f"env.wrappers: '{name}' cannot wrap env.id={env_id}{given}: {line(error)}. Its arguments stand beside "
                "its name: env.wrappers=[{name: package.module:attr, argument: value}]."
            ) from error
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            raise ConfigError(f"env.wrappers: '{name}' returned {env!r:.80}, expected the wrapped environment.")
    require_spaces(env_id, env)
    if isinstance(env, VectorEnv) and env.num_envs != num_envs:
        raise ConfigError(
            f"env.id={env_id} is a vector environment of {env.num_envs} environments where {num_envs} were asked for "
            "(num_envs). Fix: build as many as num_envs says, all of one kind: any slot plays any episode."
        )
    return env


def _is_vector(cfg: GymSettings) -> bool:
    """Whether what the name stands for is one environment for all slots, as far as its declaration tells."""
    assert cfg.id is not None
    if _is_path(cfg.id):
        creator = CREATORS.get(cfg.id)
        kind = isinstance(creator, type)
        return issubclass(creator, VectorEnv) if kind else "num_envs" in inspect.signature(creator).parameters
    module, _, name = cfg.id.rpartition(":")
    with contextlib.suppress(Exception):  # building it says what is wrong
        if module:
            importlib.import_module(module)
    spec = gymnasium.registry.get(name)
    return spec is not None and spec.entry_point is None


def _draw_without_display() -> None:
    """Let MuJoCo draw where there is no screen: choose its OpenGL unless the user has, or it cannot be loaded."""
    silent = {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ)
    if not silent or os.name != "posix" or importlib.util.find_spec("mujoco") is None:
        return
    backend = choose_renderer().backend
    if importlib.util.find_spec("OpenGL") is not None and ctypes.util.find_library(
        {"egl": "EGL"}.get(backend, "OSMesa")
    ):
        os.environ["MUJOCO_GL"] = backend  # for processes that this one starts as well
        choose_device()


def _construct(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int) -> Any:
    assert cfg.id is not None
    try:
        vector = _is_vector(cfg)
        if _is_path(cfg.id):
            creator = CREATORS.get(cfg.id)
            if isinstance(creator, type):
                require_env(cfg.id, creator)
            return creator(**{"num_envs": num_envs} if vector else {}, **kwargs)
        if vector:
            return gymnasium.make_vec(cfg.id, num_envs, vectorization_mode="vector_entry_point", **kwargs)
        return gymnasium.make(cfg.id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise MissingDependencyError(
            f"env.id={cfg.id} needs a package that is not installed: {one_line(error)}."
        ) from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.NamespaceNotFound) as error:
        hint = closest(cfg.id, gymnasium.registry.keys())
        reason = one_line(error).partition(" Did you mean")[0].partition(" Have you installed")[0]
        raise UnknownNameError(
            f"env.id={cfg.id}: {reason.rstrip('.')}.{hint} An id that another package registers is written "
            f"package:Id-v0, one that a module of it registers package.module:Id-v0; your own class "
            "package.module:Class."
        ) from error
    except EmbodyError:
        raise
    except Exception as error:
        raise ConfigError(
            f"env.id={cfg.id} cannot be built with env.kwargs={kwargs}: {line(error)}. Compare env.kwargs with the "
            "arguments of its constructor."
        ) from error


def _is_path(name: str) -> bool:
    """package.module:attr, other than the package:Id-v0 that Gymnasium knows itself."""
    return ":" in name and re.fullmatch(r"[A-Za-z_][\w.]*", name.partition(":")[2]) is not None
