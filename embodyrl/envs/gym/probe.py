"""Measurement of a Gymnasium environment's properties: reads its attributes, resets it and executes a few steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from embodyrl.envs.check.info_warnings import warnings as info_warnings
from embodyrl.envs.check.observations import warnings as observation_warnings
from embodyrl.envs.gym.api import begin_episode, format_error, require_step, to_bool, to_float
from embodyrl.envs.gym.create import (
    STATISTICS_NOT_SAVED,
    builds_vector,
    create_with_suites,
    find_running_statistics,
    find_wrapper,
    takes_render_mode,
)
from embodyrl.envs.gym.episode_info import get_success_keys, has_success_key, read_instruction
from embodyrl.envs.gym.goals import GymGoals
from embodyrl.envs.gym.properties import PROBED_S, Probe, get_max_probe_steps, measure_success
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import ObservationWriter, copy_observation
from embodyrl.envs.gym.vector_probe import probe_vector_steps
from embodyrl.envs.mujoco_rendering import select_headless_backend
from embodyrl.errors import EmbodyError, EnvError
from embodyrl.types import EnvSpec

_MAX_OBSERVATIONS = 4
"""Maximum number of observations that the warnings compare."""


def probe(cfg: GymSettings, *, renders: bool = True, known_spec: EnvSpec | None = None) -> Probe:
    """Build the environment, measure its properties, and close it.

    Args:
        cfg: settings of the environment.
        renders: True if `render` will be called; False: set no render mode, because some environments render each
            step.
        known_spec: spec from an earlier probe, whose first steps are not repeated; None: reset and step the
            environment.

    Raises:
        EmbodyError: see `create`; or the environment's first steps violate Gymnasium's interface.
    """
    kwargs = dict(cfg.kwargs)
    select_headless_backend()
    # Two environments are the minimum to check whether they can be reset separately.
    env, suites = create_with_suites(cfg, kwargs, 2 if builds_vector(cfg) else 1)
    close_warnings: list[str] = []
    with _close_at_end(cfg, env, close_warnings):
        is_vector = isinstance(env, VectorEnv)
        modes: Iterable[str] = (env.metadata or {}).get("render_modes") or ()
        sets_render_mode = renders and not is_vector and env.render_mode is None and "render_mode" not in kwargs
        if sets_render_mode and "rgb_array" in modes and takes_render_mode(cfg):
            kwargs["render_mode"] = "rgb_array"
        try:
            if known_spec is not None:
                probed = _get_known_fields(known_spec)
            else:
                probed = probe_vector_steps(cfg, env) if is_vector else _probe_steps(cfg, env)
        except EmbodyError:
            raise
        except Exception as error:
            raise EnvError(f"env.id={cfg.id}: the first reset or step failed: {format_error(error)}.") from error
        result = Probe(
            observation_space=env.single_observation_space if is_vector else env.observation_space,
            action_space=env.single_action_space if is_vector else env.action_space,
            max_episode_steps=_get_time_limit(cfg, env),
            kwargs=kwargs,
            has_expert=not is_vector and env.has_wrapper_attr("expert_action"),
            is_vector=is_vector,
            renders="rgb_array" in (env.render_mode, *(modes if env.render_mode is None and not is_vector else ())),
            warnings=(*probed.pop("warnings"), *_suite_warnings(cfg, suites), *_statistics_warnings(cfg, env)),
            **probed,
        )
    return replace(result, warnings=(*result.warnings, *close_warnings))


@contextlib.contextmanager
def _close_at_end(cfg: GymSettings, env: Any, close_warnings: list[str]) -> Iterator[None]:
    """Close the environment at the end of the block; append a warning to `close_warnings` if `close` fails."""
    try:
        yield
    finally:
        try:
            env.close()
        except Exception as error:
            close_warnings.append(
                f"close() of env.id={cfg.id} failed: {format_error(error)}; fix: let close() end without an error"
            )


def _get_known_fields(spec: EnvSpec) -> dict[str, Any]:
    """Reconstruct the result of `_probe_steps` from an earlier spec of the environment."""
    return {
        "reports_success": spec.reward.reports_success,
        "success": spec.reward.success,
        "dense": spec.reward.dense,
        "warnings": (),
        "has_goals": spec.goal is not None,
        "instruction": spec.tasks[0] if spec.text.instructed else None,
    }


def _get_time_limit(cfg: GymSettings, env: Any) -> int:
    """Return the time limit in env steps of the environment or of a TimeLimit wrapper; 0: no limit."""
    limits = [env.spec.max_episode_steps] if env.spec is not None else []
    for name, arguments in cfg.wrapped:
        wrapper = find_wrapper(name)
        if isinstance(wrapper, type) and issubclass(wrapper, gymnasium.wrappers.TimeLimit):
            limits.append(arguments.get("max_episode_steps"))
    return min((int(limit) for limit in limits if limit and limit > 0), default=0)  # -1: no limit


def _probe_steps(cfg: GymSettings, env: Any) -> dict[str, Any]:
    """Reset and step the environment; return the `Probe` fields that are measured in an episode."""
    env_id, keys = str(cfg.id), get_success_keys(cfg)
    first, reset_info = begin_episode(env_id, env, 0)
    observations = [copy_observation(env.observation_space, first)]
    env.action_space.seed(0)
    observation, reward, *ends, info = require_step(env_id, env.step(env.action_space.sample()))
    to_float(env_id, reward)
    for name, end in zip(("terminated", "truncated"), ends, strict=True):
        to_bool(env_id, name, end)
    goals = GymGoals.applies(env, observation, reward)
    infos, rewards = [info], [reward]
    has_success, max_steps = has_success_key(info, keys), get_max_probe_steps(cfg)
    started = time.perf_counter()
    # Some report success only at the end of an episode.
    with contextlib.suppress(Exception):  # later errors are reported when episodes run
        while not any(to_bool(env_id, "end", end) for end in ends) and (
            len(observations) < _MAX_OBSERVATIONS or not has_success
        ):
            if len(observations) < _MAX_OBSERVATIONS:
                observations.append(copy_observation(env.observation_space, observation))
            if len(infos) >= max_steps or time.perf_counter() - started > PROBED_S:
                break
            observation, reward, *ends, info = require_step(env_id, env.step(env.action_space.sample()))
            infos.append(info)
            rewards.append(reward)
            has_success = has_success or has_success_key(info, keys)
    writer = ObservationWriter(env_id, env.observation_space)
    writer.check(first)
    instruction = read_instruction(cfg, writer.texts, first, reset_info, env)
    warnings = [
        *observation_warnings(env.observation_space, observations, env),
        *info_warnings(cfg, writer.texts, reset_info, instruction, infos, has_success),
    ]
    return {
        **measure_success(infos, keys, rewards),
        "warnings": tuple(warnings),
        "has_goals": goals,
        "instruction": instruction,
    }


def _statistics_warnings(cfg: GymSettings, env: Any) -> list[str]:
    """Warn about running statistics in the environment itself; those of `env.wrappers` are refused."""
    return [
        f"'{name}' in env.id={cfg.id} {STATISTICS_NOT_SAVED.removesuffix('.')}" for name in find_running_statistics(env)
    ]


def _suite_warnings(cfg: GymSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) < 2 or cfg.suite is not None:
        return ()
    return (f"env.id={cfg.id} returns {len(names)} environments and {names[0]} is used; select with env.suite=NAME",)
