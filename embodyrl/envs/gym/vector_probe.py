"""Tests of Gymnasium vector environments."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np

from embodyrl.envs.check.info_warnings import warnings as info_warnings
from embodyrl.envs.check.observations import warnings as observation_warnings
from embodyrl.envs.gym.api import format_error, require_step, reset_env
from embodyrl.envs.gym.episode_info import get_success_keys, has_success_key, read_instruction
from embodyrl.envs.gym.properties import PROBED_S, get_max_probe_steps, measure_success
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import ObservationWriter, get_member, iterate_leaves
from embodyrl.envs.gym.vector_sims import get_autoreset_mode, get_env_info
from embodyrl.errors import ConfigError


def probe_vector_steps(cfg: GymSettings, env: Any) -> dict[str, Any]:
    """Reset and step a vector of two environments; check that one environment can be reset alone."""
    env_id = str(cfg.id)
    result: Any = None
    first: Any = None
    reset_info: dict[str, Any] = {}
    try:
        first, reset_info = reset_env(env_id, env, seed=[0, 1])
        first = _get_first(env, first)
        env.action_space.seed(0)
        result = require_step(env_id, env.step(env.action_space.sample()))
        rows_before = _get_observation_bytes(env, result[0])
        observation = reset_env(env_id, env, seed=[7, 8], options={"reset_mask": np.array([False, True])})[0]
        is_unchanged = _get_observation_bytes(env, observation)[0] == rows_before[0]
        problem = (
            "" if is_unchanged else "reset with options={'reset_mask': [False, True]} restarted environment 0 as well"
        )
    except Exception as error:
        problem = f"reset(seed=[...], options={{'reset_mask': ...}}) or step failed: {format_error(error)}"
    if problem:
        raise ConfigError(
            f"env.id={env_id} is a vector environment that resets all environments together, "
            f"so environments cannot be reset individually: {problem}. Fix: let reset accept a list of seeds and a "
            f"reset mask, as SyncVectorEnv does, or set env.id to the single environment (env.id=CartPole-v1), "
            f"which is built once per environment."
        )
    keys = get_success_keys(cfg)
    infos, rewards = _continue_episode(cfg, env, keys, result)
    space = env.single_observation_space
    writer = ObservationWriter(env_id, space)
    writer.check(first)
    first_info = get_env_info(reset_info, 0, env.num_envs)
    instruction = read_instruction(cfg, writer.texts, first, first_info)
    success = measure_success(infos, keys, rewards)
    warnings = [
        *observation_warnings(space, [first], env),
        *_autoreset_warnings(env),
        *info_warnings(cfg, writer.texts, first_info, instruction, infos, success["reports_success"]),
    ]
    return {
        **success,
        "warnings": tuple(warnings),
        "instruction": instruction,
    }


def _continue_episode(cfg: GymSettings, env: Any, keys: Sequence[str], result: Any) -> tuple[list[Any], list[Any]]:
    """Step until an episode ends or success is reported; return the infos and rewards, including those of `result`."""
    infos, rewards, started = [result[4]], [result[1]], time.perf_counter()
    with contextlib.suppress(Exception):  # later errors are reported when episodes run
        while not (np.any(result[2]) or np.any(result[3]) or has_success_key(infos[-1], keys)):
            if len(infos) >= get_max_probe_steps(cfg) or time.perf_counter() - started > PROBED_S:
                break
            result = require_step(str(cfg.id), env.step(env.action_space.sample()))
            infos.append(result[4])
            rewards.append(result[1])
    return infos, rewards


def _autoreset_warnings(env: Any) -> Iterator[str]:
    if get_autoreset_mode(env) is None:
        yield (
            "metadata of the vector environment has no autoreset_mode, so it must not reset environments by itself: "
            "that loses final observations; fix: metadata={'autoreset_mode': gymnasium.vector.AutoresetMode.DISABLED}, "
            "NEXT_STEP or SAME_STEP"
        )


def _get_first(env: Any, batch: Any) -> Any:
    return copy.deepcopy(next(iter(gymnasium.vector.utils.iterate(env.observation_space, batch))))


def _get_observation_bytes(env: Any, batch: Any) -> list[bytes]:
    """Return each environment's observation as bytes, for comparison."""
    rows = gymnasium.vector.utils.iterate(env.observation_space, batch)
    paths = [path for path, _ in iterate_leaves(env.single_observation_space, ())]
    return [b"".join(np.asarray(get_member(row, path)).tobytes() for path in paths) for row in rows]
