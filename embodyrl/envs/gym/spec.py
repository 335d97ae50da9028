"""Spec of a Gymnasium environment, derived from its measured properties."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from embodyrl.envs.gym.settings import GymSettings
from embodyrl.errors import ConfigError
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
    from embodyrl.envs.gym.properties import Probe

SEEDS = 100_000
"""Number of reset ids; each reset id is the seed of an episode."""


def describe_here(cfg: GymSettings, pictures: bool) -> EnvSpec:
    """Return the environment's spec, measured in this process (see `GymFactory.describe`)."""
    from embodyrl.envs.gym.probe import probe

    return spec_of(cfg, probe(cfg, pictures=pictures))


def spec_of(cfg: GymSettings, found: Probe) -> EnvSpec:
    """Return the spec of an environment with the properties `found`."""
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
        warnings=found.warnings,
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
