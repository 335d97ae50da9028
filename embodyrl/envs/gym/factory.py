"""Checks, description and construction of Gymnasium environments."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.isolated import NoAnswerError, call_isolated
from embodyrl.envs.protocol import EnvContext, GoalJudge
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import ConfigError, EnvError
from embodyrl.leftovers import left_after
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

if TYPE_CHECKING:
    from embodyrl.envs.gym.probe import Probe

_BUILD_S = 600.0
"""Time limit for building and testing one environment; simulators that load assets take minutes."""
_CLOSE_S = 1.0
"""Time limit for threads and child processes to end after `close`."""
SEEDS = 100_000
"""Number of reset ids; each reset id is the seed of an episode."""


class GymFactory(SimFactory[GymSettings]):
    """Builds the environment of `env.id`."""

    settings = GymSettings

    def problems(self, cfg: GymSettings) -> Iterator[str]:
        """Yield errors of the settings, without importing gymnasium."""
        if cfg.id is None:
            yield (
                "env.id is not set. Set it to a Gymnasium id (env.id=CartPole-v1) or a class "
                "(env.id=my_pkg.my_mod:MyEnv)."
            )
        for name, _ in cfg.wrapped:
            if ":" not in name:
                yield (
                    f"env.wrappers: '{name}' is not package.module:attr of a callable env -> env, for example "
                    "gymnasium.wrappers:FlattenObservation or {name: gymnasium.wrappers:TimeLimit, "
                    "max_episode_steps: 200}."
                )
        for split, values in cfg.splits.items():
            if values.ignore_terminations:
                yield (
                    f"env.{split}.ignore_terminations=true: a Gymnasium environment must not be stepped after its "
                    f"end; set it to false."
                )

    def describe(self, cfg: GymSettings, context: EnvContext) -> EnvSpec:
        """Describe the environment: build one, step it and close it, in a separate process.

        Raises:
            UnknownNameError: no environment or wrapper has this name.
            MissingDependencyError: a required package is not installed.
            ConfigError: the constructor rejects `env.kwargs`, or a space is not supported.
            EnvError: the environment's first steps violate Gymnasium's interface, crash or hang.
        """
        if _is_loaded(cfg):
            return _describe(cfg, context.pictures)
        try:
            return call_isolated(f"{__name__}:describe_alone", cfg, context.pictures, kind=EnvSpec, timeout_s=_BUILD_S)
        except NoAnswerError as error:
            raise EnvError(
                f"env.id={cfg.id}: the test process, which builds, resets and steps the environment once, "
                f"failed: {error}. Fix the "
                "environment; --traceback shows the log of the process."
            ) from error

    def simulators(self, cfg: GymSettings, context: EnvContext) -> Simulators:
        """Return simulators: one environment per slot, built at its first reset, or one vector environment."""
        from embodyrl.envs.gym.create import create, vector_support
        from embodyrl.envs.gym.probe import probe
        from embodyrl.envs.gym.sims import GymSims

        found = probe(cfg, pictures=context.pictures, described=context.described)
        spec, build = _spec(cfg, found), partial(create, cfg, found.kwargs)
        if found.vector and (vectors := vector_support(cfg)) is not None:
            return vectors.simulators(cfg, spec, found, build, context.num_slots)
        return GymSims(cfg, spec, found, build)

    def judge(self, cfg: GymSettings) -> GoalJudge:
        """Build an environment that computes the rewards of relabelled goals."""
        from embodyrl.envs.gym.create import create
        from embodyrl.envs.gym.probe import GOALS

        (support,) = GOALS.every()
        return support(str(cfg.id), create(cfg, dict(cfg.kwargs)))


def _is_loaded(cfg: GymSettings) -> bool:
    """Return True if this process runs the environment's code: a worker, or a Python caller that imported it."""
    module, _, name = str(cfg.id).rpartition(":")
    if multiprocessing.parent_process() is not None or module in sys.modules:
        return True
    return not module and "gymnasium" in sys.modules and name in sys.modules["gymnasium"].registry


def _describe(cfg: GymSettings, pictures: bool) -> EnvSpec:
    from embodyrl.envs.gym.probe import probe

    return _spec(cfg, probe(cfg, pictures=pictures))


def describe_alone(cfg: GymSettings, pictures: bool) -> EnvSpec:
    """Describe the environment in a separate process that exits afterwards; warn of threads that are still running."""
    spec = _describe(cfg, pictures)
    left = left_after(_CLOSE_S)
    doubt = f"{left} did not end with the environment's close(); fix: stop threads and processes in close()"
    return replace(spec, doubts=(*spec.doubts, doubt)) if left else spec


def _spec(cfg: GymSettings, found: Probe) -> EnvSpec:
    from embodyrl.envs.gym.spaces import ACHIEVED, DESIRED, LONGEST_TEXT, ObservationWriter, action_space

    env_id = cfg.id
    assert env_id is not None, "validate first"
    observations = ObservationWriter(env_id, found.observation_space)
    fixed = cfg.instruction is not None or found.instruction is None
    return EnvSpec(
        name=env_id,
        action=_with_controls(cfg, action_space(env_id, found.action_space)),
        tasks=(found.instruction or env_id,),
        text=TextSpec(
            instructed=found.instruction is not None,
            prompt_bytes=0
            if fixed
            else max(observations.text_bytes, LONGEST_TEXT, len(str(found.instruction).encode())),
        ),
        # Each episode may have another instruction.
        states_per_task=(SEEDS,),
        cameras=CameraSpec(names=observations.cameras, size=observations.image_size, grey=observations.grey),
        state_dim=observations.state_dim,
        max_episode_steps=found.max_episode_steps or cfg.longest_episode,
        goal=GoalSpec(achieved=observations.columns(ACHIEVED), desired=observations.columns(DESIRED))
        if found.goals
        else None,
        simulator=SimulatorSpec(
            may_truncate=True, lockstep=found.vector, renders=found.draws or bool(observations.cameras)
        ),
        reward=RewardSpec(reports_success=found.reports_success),
        expert=ExpertSpec(tasks=(0,) if found.expert else ()),
        doubts=found.doubts,
    )


def _with_controls(cfg: GymSettings, action: ActionSpec) -> ActionSpec:
    """Add the keyboard and gamepad inputs of `env.controls` to the action spec.

    Raises:
        ConfigError: an input does not fit the action space.
    """
    if len(cfg.neutral) not in (0, action.dim):
        raise ConfigError(f"env.neutral has {len(cfg.neutral)} numbers, but the actions of {cfg.id} have {action.dim}.")
    controls = tuple(Control(**{"label": "", **each}) for each in cfg.controls) or None
    low, high = action.bounds
    for number, each in enumerate(controls or ()):
        if not (0 <= each.index < action.dim and low[each.index] <= each.value <= high[each.index]):
            raise ConfigError(
                f"env.controls[{number}]: dimension {each.index} and value {each.value:g} do not fit the actions of "
                f"{cfg.id}, which have {action.dim} dimensions in {low}..{high}."
            )
    return replace(action, controls=controls, neutral=tuple(cfg.neutral))


FACTORY = GymFactory()
