"""Measurement of a Gymnasium environment's properties: reads its attributes, resets it and executes a few steps."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import iterate

from embodyrl.envs.check.info_warnings import get_info_warnings
from embodyrl.envs.check.observations import get_observation_warnings
from embodyrl.envs.gym.api import begin_episode, require_step, reset_env, to_bool, to_float
from embodyrl.envs.gym.create import (
    STATISTICS_NOT_SAVED,
    create_with_suites,
    find_running_statistics,
    find_wrapper,
    takes_render_mode,
)
from embodyrl.envs.gym.episode_info import (
    describe_success_source,
    get_success_keys,
    has_success_key,
    read_instruction,
    read_success,
)
from embodyrl.envs.gym.goals import GymGoalReward
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.sims import Probe
from embodyrl.envs.gym.spaces import (
    ACHIEVED,
    DESIRED,
    MIN_TEXT_BYTES,
    ObservationWriter,
    convert_action_space,
    copy_observation,
)
from embodyrl.envs.gym.vector_sims import get_autoreset_mode, get_env_info
from embodyrl.envs.mujoco_rendering import select_headless_backend
from embodyrl.envs.settings import NUM_SEEDS
from embodyrl.errors import ConfigError, EmbodyError, EnvError, format_error
from embodyrl.types import (
    ActionSpec,
    CameraSpec,
    Control,
    EnvSpec,
    ExpertSpec,
    GoalSpec,
    RewardSpec,
    SimulatorSpec,
    TextSpec,
)

_MAX_OBSERVATIONS = 4
"""Maximum number of observations that the warnings compare."""
_MAX_STEPS, _MAX_STEPS_WITH_KEY, _MAX_SECONDS = 256, 2048, 2.0
"""Maximum steps and seconds of the probed episode, in which `info` is searched for a success key; more steps for
`env.success_key`, which may appear only at the end of an episode."""


class _Episode(NamedTuple):
    """Properties of an environment that are measured in an episode."""

    reward: RewardSpec
    instruction: str | None
    """Instruction of the episode; None: no instruction."""
    has_goals: bool
    """True if the environment can compute rewards for relabeled goals."""
    warnings: tuple[str, ...]
    """Warnings about probable mistakes in the environment."""


def probe(cfg: GymSettings, *, renders: bool = True, known_spec: EnvSpec | None = None) -> Probe:
    """Build the environment, measure its properties, and close it.

    Args:
        cfg: settings of the environment.
        renders: True if `render` will be called; False: set no render mode, because some environments render each
            step.
        known_spec: spec from an earlier probe, which is returned without resetting and stepping the environment again;
            None: reset and step the environment.

    Raises:
        EmbodyError: see `create`; or the environment's first steps violate Gymnasium's interface.
    """
    kwargs = dict(cfg.kwargs)
    select_headless_backend()
    # Two environments are the minimum to check whether a vector environment can reset them separately.
    env, suites = create_with_suites(cfg, kwargs, num_envs=2)
    close_warnings: list[str] = []
    with _close_at_end(cfg, env, close_warnings):
        is_vector = isinstance(env, VectorEnv)
        modes: Iterable[str] = (env.metadata or {}).get("render_modes") or ()
        sets_render_mode = renders and not is_vector and env.render_mode is None and "render_mode" not in kwargs
        if sets_render_mode and "rgb_array" in modes and takes_render_mode(cfg):
            kwargs["render_mode"] = "rgb_array"
        space = env.single_observation_space if is_vector else env.observation_space
        action_space = env.single_action_space if is_vector else env.action_space
        try:
            episode = _probe_episode(cfg, env, space) if known_spec is None else _get_known_properties(known_spec)
        except EmbodyError:
            raise
        except Exception as error:
            raise EnvError(f"env.id={cfg.id}: the first reset or step failed: {format_error(error)}.") from error
        env_id = str(cfg.id)
        writer = ObservationWriter(env_id, space)
        can_render = "rgb_array" in (env.render_mode, *(modes if env.render_mode is None and not is_vector else ()))
        has_expert = not is_vector and env.has_wrapper_attr("expert_action")
        spec = EnvSpec(
            name=env_id,
            action=_add_controls(cfg, convert_action_space(env_id, action_space)),
            tasks=(episode.instruction or env_id,),
            text=_build_text_spec(cfg, writer, episode.instruction),
            # Each episode may have another instruction.
            states_per_task=(NUM_SEEDS,),
            cameras=CameraSpec(names=writer.cameras, size=writer.image_size, grey=writer.grey),
            state_dim=writer.state_dim,
            max_episode_steps=_get_time_limit(cfg, env) or cfg.longest_episode,
            goal=GoalSpec(achieved=writer.get_columns(ACHIEVED), desired=writer.get_columns(DESIRED))
            if episode.has_goals
            else None,
            simulator=SimulatorSpec(may_truncate=True, lockstep=is_vector, renders=can_render or bool(writer.cameras)),
            reward=episode.reward,
            expert=ExpertSpec(tasks=(0,) if has_expert else ()),
            warnings=(*episode.warnings, *_suite_warnings(cfg, suites), *_statistics_warnings(cfg, env)),
        )
    spec = replace(spec, warnings=(*spec.warnings, *close_warnings))
    return Probe(spec=spec, observation_space=space, action_space=action_space, kwargs=kwargs)


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


def _get_known_properties(spec: EnvSpec) -> _Episode:
    """Reconstruct the result of `_probe_episode` from an earlier spec of the environment."""
    reward = RewardSpec(
        reports_success=spec.reward.reports_success, success=spec.reward.success, dense=spec.reward.dense
    )
    return _Episode(reward, spec.tasks[0] if spec.text.instructed else None, spec.goal is not None, ())


def _build_text_spec(cfg: GymSettings, writer: ObservationWriter, instruction: str | None) -> TextSpec:
    if instruction is None:
        return TextSpec(instructed=False)
    if cfg.instruction is not None:
        return TextSpec()
    return TextSpec(prompt_bytes=max(writer.text_bytes, MIN_TEXT_BYTES, len(instruction.encode())))


def _add_controls(cfg: GymSettings, action: ActionSpec) -> ActionSpec:
    """Add the keyboard and gamepad inputs of `env.controls` to the action spec.

    Raises:
        ConfigError: an input does not fit the action space.
    """
    if len(cfg.neutral) not in (0, action.dim):
        raise ConfigError(f"env.neutral has {len(cfg.neutral)} numbers, expected {action.dim} for actions of {cfg.id}.")
    controls = tuple(Control(**{"label": "", **control}) for control in cfg.controls) or None
    low, high = action.bounds
    for number, control in enumerate(controls or ()):
        if not (0 <= control.index < action.dim and low[control.index] <= control.value <= high[control.index]):
            raise ConfigError(
                f"env.controls[{number}]: index={control.index}, value={control.value:g} is outside the action space "
                f"of {cfg.id}, which has {action.dim} dimensions in {low}..{high}."
            )
    return replace(action, controls=controls, neutral=tuple(cfg.neutral))


def _get_time_limit(cfg: GymSettings, env: Any) -> int:
    """Return the time limit in env steps of the environment or of a TimeLimit wrapper; 0: no limit."""
    limits = [env.spec.max_episode_steps] if env.spec is not None else []
    for name, arguments in cfg.wrapper_arguments:
        wrapper = find_wrapper(name)
        if isinstance(wrapper, type) and issubclass(wrapper, gymnasium.wrappers.TimeLimit):
            limits.append(arguments.get("max_episode_steps"))
    return min((int(limit) for limit in limits if limit and limit > 0), default=0)  # -1: no limit


def _probe_episode(cfg: GymSettings, env: Any, space: gymnasium.Space[Any]) -> _Episode:
    """Run random actions for at most one episode and measure properties; of a vector environment, of environment 0."""
    env_id, keys, is_vector = str(cfg.id), get_success_keys(cfg), isinstance(env, VectorEnv)
    if is_vector:
        first, reset_info, result = _start_vector(env_id, env)
        observations, copy_first, has_goals = [first], partial(_copy_first, env), False
    else:
        first, reset_info = begin_episode(env_id, env, 0)
        copy_first = partial(copy_observation, space)
        observations = [copy_first(first)]
        env.action_space.seed(0)
        result = require_step(env_id, env.step(env.action_space.sample()))
        to_float(env_id, result[1])
        for name, end in zip(("terminated", "truncated"), result[2:4], strict=True):
            to_bool(env_id, name, end)
        has_goals = GymGoalReward.can_recompute_reward(env, result[0], result[1])
    infos, rewards = _continue_episode(cfg, env, result, observations, copy_first)
    reward = _measure_success(infos, keys, rewards)
    writer = ObservationWriter(env_id, space)
    writer.check(first)
    instruction = read_instruction(cfg, writer.texts, first, reset_info, None if is_vector else env)
    warnings = (
        *get_observation_warnings(space, observations, env),
        *(_autoreset_warnings(env) if is_vector else ()),
        *get_info_warnings(cfg, writer.texts, reset_info, instruction, infos, reward.reports_success),
    )
    return _Episode(reward, instruction, has_goals, warnings)


def _start_vector(env_id: str, env: VectorEnv[Any, Any, Any]) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """Reset and step two environments; return observation and info of environment 0, and the result of the step.

    Raises:
        ConfigError: one environment cannot be reset alone.
    """
    problem = "reset with options={'reset_mask': [False, True]} restarted environment 0 as well"
    try:
        batch, infos = reset_env(env_id, env, seed=[0, 1])
        first = _copy_first(env, batch)
        env.action_space.seed(0)
        result = require_step(env_id, env.step(env.action_space.sample()))
        before = _copy_first(env, result[0])
        batch = reset_env(env_id, env, seed=[7, 8], options={"reset_mask": np.array([False, True])})[0]
        if data_equivalence(_copy_first(env, batch), before, exact=True):
            return first, get_env_info(infos, 0, env.num_envs), result
    except Exception as error:
        problem = f"reset(seed=[...], options={{'reset_mask': ...}}) or step failed: {format_error(error)}"
    raise ConfigError(
        f"env.id={env_id} is a vector environment that resets all environments together, "
        f"so environments cannot be reset individually: {problem}. Fix: let reset accept a list of seeds and a "
        f"reset mask, as SyncVectorEnv does, or set env.id to the single environment (env.id=CartPole-v1), "
        f"which is built once per environment."
    )


def _copy_first(env: VectorEnv[Any, Any, Any], batch: Any) -> Any:
    """Return a copy of the first observation of a batch."""
    return copy.deepcopy(next(iter(iterate(env.observation_space, batch))))


def _continue_episode(
    cfg: GymSettings, env: Any, result: tuple[Any, ...], observations: list[Any], copy_first: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Step until the episode ends, or `observations` is full and success is reported; return infos and rewards.

    `result` is the result of the first step. Some environments report success only at the end of an episode.
    """
    keys, max_steps = get_success_keys(cfg), _MAX_STEPS if cfg.success_key is None else _MAX_STEPS_WITH_KEY
    infos, rewards, started = [result[4]], [result[1]], time.perf_counter()
    has_success = has_success_key(result[4], keys)
    with contextlib.suppress(Exception):  # later errors are reported when episodes run
        while not (np.any(result[2]) or np.any(result[3])):
            if len(observations) < _MAX_OBSERVATIONS:
                observations.append(copy_first(result[0]))
            elif has_success:
                break
            if len(infos) >= max_steps or time.perf_counter() - started > _MAX_SECONDS:
                break
            result = require_step(str(cfg.id), env.step(env.action_space.sample()))
            infos.append(result[4])
            rewards.append(result[1])
            has_success = has_success or has_success_key(result[4], keys)
    return infos, rewards


def _measure_success(infos: Sequence[dict[str, Any]], keys: Sequence[str], rewards: Sequence[Any]) -> RewardSpec:
    """Return where success is read, and whether the reward is dense: positive in a step without success."""
    has_success = any(has_success_key(info, keys) for info in infos)
    dense = has_success and any(
        np.any((np.asarray(reward) > 0) & ~np.asarray(read_success(info, keys)).astype(np.bool_))
        for info, reward in zip(infos, rewards, strict=True)
    )
    return RewardSpec(reports_success=has_success, success=describe_success_source(infos, keys), dense=bool(dense))


def _autoreset_warnings(env: Any) -> Iterator[str]:
    if get_autoreset_mode(env) is None:
        yield (
            "metadata of the vector environment has no autoreset_mode, so it must not reset environments by itself: "
            "that loses final observations; fix: metadata={'autoreset_mode': gymnasium.vector.AutoresetMode.DISABLED}, "
            "NEXT_STEP or SAME_STEP"
        )


def _statistics_warnings(cfg: GymSettings, env: Any) -> list[str]:
    """Warn about running statistics in the environment itself; in `env.wrappers`, they raise an error."""
    return [
        f"'{name}' in env.id={cfg.id} {STATISTICS_NOT_SAVED.removesuffix('.')}" for name in find_running_statistics(env)
    ]


def _suite_warnings(cfg: GymSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) < 2 or cfg.suite is not None:
        return ()
    return (f"env.id={cfg.id} returns {len(names)} environments and {names[0]} is used; select with env.suite=NAME",)
