"""Spec of a Gymnasium environment, derived from its measured properties."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.settings import SEEDS
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


def describe_in_process(cfg: GymSettings, renders: bool) -> EnvSpec:
    """Return the environment's spec, measured in this process (see `GymFactory.describe`)."""
    from embodyrl.envs.gym.probe import probe

    return build_spec(cfg, probe(cfg, renders=renders))


def build_spec(cfg: GymSettings, probe: Probe) -> EnvSpec:
    """Return the spec of an environment with the properties `probe`."""
    from embodyrl.envs.gym.spaces import ACHIEVED, DESIRED, MIN_TEXT_BYTES, ObservationWriter, convert_action_space

    env_id = cfg.id
    assert env_id is not None, "validate first"
    writer = ObservationWriter(env_id, probe.observation_space)
    has_fixed_instruction = cfg.instruction is not None or probe.instruction is None
    return EnvSpec(
        name=env_id,
        action=_add_controls(cfg, convert_action_space(env_id, probe.action_space)),
        tasks=(probe.instruction or env_id,),
        text=TextSpec(
            instructed=probe.instruction is not None,
            prompt_bytes=0
            if has_fixed_instruction
            else max(writer.text_bytes, MIN_TEXT_BYTES, len(str(probe.instruction).encode())),
        ),
        # Each episode may have another instruction.
        states_per_task=(SEEDS,),
        cameras=CameraSpec(names=writer.cameras, size=writer.image_size, grey=writer.grey),
        state_dim=writer.state_dim,
        max_episode_steps=probe.max_episode_steps or cfg.longest_episode,
        goal=GoalSpec(achieved=writer.columns(ACHIEVED), desired=writer.columns(DESIRED)) if probe.has_goals else None,
        simulator=SimulatorSpec(
            may_truncate=True, lockstep=probe.is_vector, renders=probe.renders or bool(writer.cameras)
        ),
        reward=RewardSpec(reports_success=probe.reports_success, success=probe.success, dense=probe.dense),
        expert=ExpertSpec(tasks=(0,) if probe.has_expert else ()),
        warnings=probe.warnings,
    )


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
