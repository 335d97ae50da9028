"""Construction of Gymnasium environments from the config; each error message includes the fix."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from embodyrl.config.paths import HUB_NAME
from embodyrl.envs.gym.api import require_env, require_spaces
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.mujoco_rendering import select_headless_backend
from embodyrl.errors import ConfigError, EmbodyError, MissingDependencyError, UnknownNameError, format_error, one_line
from embodyrl.registry import closest, load, takes

AnyEnv = gymnasium.Env[Any, Any]


def find_wrapper(name: str) -> Callable[..., AnyEnv]:
    """Return the wrapper class or function at an import path.

    Raises:
        UnknownNameError: there is no wrapper at the path.
    """
    expected = "a Gymnasium wrapper, or a function from environment to environment"
    return load(name, "wrapper", wants=expected, fits=_is_wrapper)


def _is_wrapper(value: Any) -> bool:
    return issubclass(value, (gymnasium.Env, VectorEnv)) if isinstance(value, type) else takes(0)(value)


_COUNT_PARAMETERS = ("num_envs", "n_envs")
"""Names of the parameter for the number of environments; LeRobot uses the second name."""
GL_FIX = (
    "Fix: MUJOCO_GL=osmesa (apt-get install libosmesa6; pip install PyOpenGL) or, with a GPU, MUJOCO_GL=egl "
    "(apt-get install libegl1); or record nothing with video=none."
)


def create(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int = 1) -> Any:
    """Build one environment, or a native vector environment of `num_envs`, with its wrappers.

    Raises:
        UnknownNameError: no environment or wrapper has this name.
        MissingDependencyError: a required package is not installed.
        ConfigError: the constructor or a wrapper rejects its arguments, or does not return an environment.
    """
    select_headless_backend()
    return create_with_suites(cfg, kwargs, num_envs)[0]


def create_with_suites(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int) -> tuple[Any, tuple[str, ...]]:
    """Build an environment (see `create`).

    Return the environment, and the names of all environments if `env.id` has several.
    """
    env_id = str(cfg.id)
    built, suites = _choose_suite(cfg, _construct(cfg, kwargs, num_envs))
    env = require_env(env_id, built)
    for name, arguments in cfg.wrapper_arguments:
        inner = env
        try:
            env = find_wrapper(name)(env, **arguments)
        except EmbodyError:
            raise
        except Exception as error:
            arguments_text = f" with {arguments}" if arguments else ""
            raise ConfigError(
                f"env.wrappers: '{name}' cannot wrap env.id={env_id}{arguments_text}: {format_error(error)}. Write the "
                "wrapper's arguments next to its name: env.wrappers=[{name: package.module:attr, argument: value}]."
            ) from error
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            raise ConfigError(f"env.wrappers: '{name}' returned {env!r:.80}, expected the wrapped environment.")
        if find_running_statistics(env) != find_running_statistics(inner):
            raise ConfigError(f"env.wrappers: '{name}' {STATISTICS_NOT_SAVED}")
    require_spaces(env_id, env)
    if isinstance(env, VectorEnv) and (env.num_envs != num_envs or not builds_vector(cfg)):
        raise ConfigError(
            f"env.id={env_id} returned a vector environment of {env.num_envs} environments, expected num_envs="
            f"{num_envs}. Fix: use a function with the argument num_envs that builds num_envs identical environments, "
            "because any environment may run any episode."
        )
    return env, suites


STATISTICS_NOT_SAVED = (
    "normalizes with running statistics, which each environment estimates alone and no checkpoint contains, so "
    "evaluations "
    "would observe other numbers than training. Fix: remove it; model.normalize_state=true normalizes states and "
    "algorithm.normalize_returns=true rewards, with saved statistics of all environments."
)


def find_running_statistics(env: Any) -> list[str]:
    """Return the class names of wrappers that update running statistics (NormalizeObservation), outermost first."""
    names = []
    while env is not None:
        attributes = getattr(env, "__dict__", {})
        is_frozen = getattr(type(env), "update_running_mean", None) is not None and not env.update_running_mean
        if not is_frozen and any(map(_is_running_statistic, attributes.values())):
            names.append(type(env).__name__)
        env = attributes.get("env") or next(iter(attributes.get("envs") or ()), None)
    return names


def _is_running_statistic(value: Any) -> bool:
    """Return True for a mean and a variance with a count of samples, as in Gymnasium and Stable-Baselines3."""
    names = getattr(value, "__dict__", {}).keys()
    return "mean" in names and bool({"var", "std", "M2"} & names) and bool({"count", "n"} & names)


def _choose_suite(cfg: GymSettings, environment: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the environment that `env.suite` selects in `environment`, and the names of all environments.

    `environment` is one environment, {suite: env}, or {suite: {task: env}}.

    Raises:
        ConfigError: `env.suite` is not one of the names.
    """
    if not isinstance(environment, dict):
        if cfg.suite is not None:
            raise ConfigError(f"env.suite={cfg.suite}: env.id={cfg.id} builds only one environment. Remove env.suite.")
        return environment, ()
    environments: dict[str, Any] = {}
    for suite, suite_tasks in environment.items():
        tasks = suite_tasks if isinstance(suite_tasks, dict) else {None: suite_tasks}
        environments |= {str(suite) if task is None else f"{suite}/{task}": env for task, env in tasks.items()}
    names = tuple(environments)
    matching = [name for name in names if cfg.suite in (None, name, name.partition("/")[0])]
    if not matching:
        problem = f"has no suite '{cfg.suite}' (env.suite). Suites: {', '.join(names)}"
        raise ConfigError(f"env.id={cfg.id} {problem if names else 'returned no environment: an empty dict'}.")
    selected = environments.pop(matching[0])
    for other in environments.values():
        if other is not selected and hasattr(other, "close"):
            other.close()
    return selected, names


def find_creator(env_id: str) -> Callable[..., Any] | None:
    """Return the class or function of `package.module:attr` or of a downloaded repository; None for a registered id."""
    if _is_path(env_id):
        return load(env_id, "env.id", wants="a Gymnasium environment, or a function that returns one", fits=takes(0))
    if "@" not in env_id or not HUB_NAME.fullmatch(env_id):
        return None
    from embodyrl.envs.gym.hub_programs import load_program

    return load_program(env_id)


def takes_render_mode(cfg: GymSettings) -> bool:
    """Return True if the constructor of the environment may accept the argument `render_mode`."""
    if cfg.id is None or (creator := find_creator(cfg.id)) is None:
        return True
    parameters = get_parameters(creator)
    return "render_mode" in parameters or inspect.Parameter.VAR_KEYWORD in [
        parameter.kind for parameter in parameters.values()
    ]


def get_parameters(creator: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or function by name; empty if they are unknown."""
    try:
        return dict(inspect.signature(creator).parameters)
    except (TypeError, ValueError):  # some classes written in C have no signature
        return {}


def builds_vector(cfg: GymSettings) -> bool:
    """Return True if the function or class of `env.id` builds one vector environment for all environments."""
    assert cfg.id is not None
    if (creator := find_creator(cfg.id)) is not None:
        is_class = isinstance(creator, type)
        return (
            issubclass(creator, VectorEnv)
            if is_class
            else not get_parameters(creator).keys().isdisjoint(_COUNT_PARAMETERS)
        )
    _import_namespace(cfg.id)
    module, _, name = cfg.id.rpartition(":")
    with contextlib.suppress(Exception):  # the construction of the environment reports the error
        if module:
            importlib.import_module(module)
    spec = gymnasium.registry.get(name)
    return spec is not None and spec.entry_point is None


def _get_vector_arguments(creator: Any, num_envs: int) -> dict[str, Any]:
    """Return the arguments with which `creator`, such as a class or `make_env`, builds `num_envs` environments."""
    if isinstance(creator, type) or "num_envs" in (parameters := get_parameters(creator)):
        return {"num_envs": num_envs}
    # LeRobot's make_env(n_envs, use_async_envs[, cfg]).
    lerobot_arguments = {"use_async_envs": False, "cfg": None}
    required = [
        name for name in lerobot_arguments if name in parameters and parameters[name].default is inspect.Parameter.empty
    ]
    return {"n_envs": num_envs} | {name: lerobot_arguments[name] for name in required}


def _construct(cfg: GymSettings, kwargs: dict[str, Any], num_envs: int) -> Any:
    assert cfg.id is not None
    try:
        creator, is_vector = find_creator(cfg.id), builds_vector(cfg)
        if creator is None and is_vector:
            return gymnasium.make_vec(cfg.id, num_envs, vectorization_mode="vector_entry_point", **kwargs)
        if creator is None:
            return gymnasium.make(cfg.id, disable_env_checker=True, **kwargs)
        if isinstance(creator, type):
            require_env(cfg.id, creator)
        return creator(**(_get_vector_arguments(creator, num_envs) if is_vector else {}), **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise MissingDependencyError(
            f"env.id={cfg.id} needs a package that is not installed: {one_line(error).rstrip('.')}. Install it."
        ) from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.NamespaceNotFound) as error:
        hint = closest(cfg.id, gymnasium.registry.keys())
        reason = one_line(error).partition(" Did you mean")[0].partition(" Have you installed")[0].rstrip(".")
        if _REPOSITORY_PATTERN.fullmatch(cfg.id) and importlib.util.find_spec(cfg.id.partition("/")[0]) is None:
            reason += (
                ". For a Hugging Face repository with an env.py, review its code, then set its commit: "
                f"env.id={cfg.id.partition('@')[0]}@COMMIT trust=true"
            )
        raise UnknownNameError(
            f"env.id={cfg.id}: {reason}.{hint} For an id of another package, write package:Id-v0 or "
            f"package.module:Id-v0; for your own class, write package.module:Class."
        ) from error
    except EmbodyError:
        raise
    except Exception as error:
        raise ConfigError(
            f"env.id={cfg.id} cannot be built with env.kwargs={kwargs}: {format_error(error)}. Compare env.kwargs with "
            "the arguments of the environment's constructor."
        ) from error


_REPOSITORY_PATTERN = re.compile(r"[\w.-]+/(?!.*-v\d+$)[\w.-]+(@\w+)?")
_NAMESPACE_PATTERN = re.compile(r"((?:\w*gym|lerobot_env_)\w*)/[^:]+")


def _import_namespace(env_id: str) -> None:
    """Import the package in an id such as `gym_pusht/PushT-v0`, if installed, because the import registers the id."""
    match = _NAMESPACE_PATTERN.fullmatch(env_id)
    if match and env_id not in gymnasium.registry and importlib.util.find_spec(match[1]) is not None:
        importlib.import_module(match[1])


def _is_path(name: str) -> bool:
    """Return True if the name is package.module:attr, and not package:Id-v0 of Gymnasium."""
    return ":" in name and re.fullmatch(r"[A-Za-z_][\w.]*", name.partition(":")[2]) is not None
