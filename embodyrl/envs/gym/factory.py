"""Factory of Gymnasium environments: config checks, spec and construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.protocol import EnvContext, GoalJudge
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import ConfigError
from embodyrl.registry import Registry, takes
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

SEEDS = 100_000
"""Number of reset ids; each reset id is the seed of an episode."""


DESCRIBERS: Registry[Callable[[GymSettings, bool], EnvSpec]] = Registry(
    "description of an environment",
    group="embodyrl.gym_describers",
    wants="a function of GymSettings and True for images that returns an EnvSpec",
    fits=takes(2),
)


class GymFactory(SimFactory[GymSettings]):
    """Factory of the Gymnasium environment that `env.id` names."""

    settings = GymSettings

    def problems(self, cfg: GymSettings) -> Iterator[str]:
        """Yield config errors without importing gymnasium."""
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
                    f"env.{split}.ignore_terminations=true: a Gymnasium environment must not be stepped after a "
                    f"termination. Set it to false."
                )

    def describe(self, cfg: GymSettings, context: EnvContext) -> EnvSpec:
        """Return the environment's spec, measured by building one environment and stepping it.

        An extension in `DESCRIBERS` builds the environment in a separate process.

        Raises:
            UnknownNameError: no environment or wrapper has this name.
            MissingDependencyError: a required package is not installed.
            ConfigError: the constructor rejects `env.kwargs`, or a space is not supported.
            EnvError: the environment's first steps violate Gymnasium's interface, crash or hang.
        """
        for describe in DESCRIBERS.every():
            return describe(cfg, context.pictures)
        return describe_here(cfg, context.pictures)

    def simulators(self, cfg: GymSettings, context: EnvContext) -> Simulators:
        """Build the simulators: one environment per slot, created at its first reset, or one vector environment."""
        from embodyrl.envs.gym.create import create, vector_support
        from embodyrl.envs.gym.probe import probe
        from embodyrl.envs.gym.sims import GymSims

        found = probe(cfg, pictures=context.pictures, described=context.described)
        spec, build = _spec(cfg, found), partial(create, cfg, found.kwargs)
        if found.vector and (vectors := vector_support(cfg)) is not None:
            return vectors.simulators(cfg, spec, found, build, context.num_slots)
        return GymSims(cfg, spec, found, build)

    def judge(self, cfg: GymSettings) -> GoalJudge:
        """Build a function that computes the rewards of relabelled goals with a single environment."""
        from embodyrl.envs.gym.create import create
        from embodyrl.envs.gym.probe import GOALS

        (support,) = GOALS.every()
        return support(str(cfg.id), create(cfg, dict(cfg.kwargs)))


def describe_here(cfg: GymSettings, pictures: bool) -> EnvSpec:
    """Return the environment's spec, measured in this process (see `GymFactory.describe`)."""
    from embodyrl.envs.gym.probe import probe

    return _spec(cfg, probe(cfg, pictures=pictures))


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
        reward=RewardSpec(reports_success=found.reports_success, success=found.success, dense=found.dense),
        expert=ExpertSpec(tasks=(0,) if found.expert else ()),
        doubts=found.doubts,
    )


def _with_controls(cfg: GymSettings, action: ActionSpec) -> ActionSpec:
    """Add the keyboard and gamepad inputs of `env.controls` to the action spec.

    Raises:
        ConfigError: an input does not fit the action space.
    """
    if len(cfg.neutral) not in (0, action.dim):
        raise ConfigError(f"env.neutral has {len(cfg.neutral)} numbers, expected {action.dim} for actions of {cfg.id}.")
    controls = tuple(Control(**{"label": "", **each}) for each in cfg.controls) or None
    low, high = action.bounds
    for number, each in enumerate(controls or ()):
        if not (0 <= each.index < action.dim and low[each.index] <= each.value <= high[each.index]):
            raise ConfigError(
                f"env.controls[{number}]: index={each.index}, value={each.value:g} is outside the action space of "
                f"{cfg.id}, which has {action.dim} dimensions in {low}..{high}."
            )
    return replace(action, controls=controls, neutral=tuple(cfg.neutral))


FACTORY = GymFactory()
