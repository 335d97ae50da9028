"""Factory of robot presets: Gymnasium environments with declared cameras, state, actions, success and time limit."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from embodyrl.controls import get_controls
from embodyrl.envs.factory import SimFactory
from embodyrl.envs.gym.factory import FACTORY as GYM
from embodyrl.envs.protocol import EnvContext, GoalReward
from embodyrl.envs.robots.presets import Preset
from embodyrl.envs.robots.settings import RobotSettings
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import EnvError, MissingDependencyError
from embodyrl.types import EnvSpec, GripperConvention


class RobotFactory(SimFactory[RobotSettings]):
    """Factory of the robot preset `env.robot`, based on the factory of Gymnasium environments."""

    settings = RobotSettings

    def problems(self, cfg: RobotSettings) -> Iterator[str]:
        """Yield config errors of the preset's Gymnasium environment."""
        yield from GYM.problems(cfg.gym)

    def describe(self, cfg: RobotSettings, context: EnvContext) -> EnvSpec:
        """Return the environment's spec, after checking that the environment matches the preset.

        Raises:
            MissingDependencyError: the package is not installed.
            EnvError: the installed package differs from the preset.
        """
        preset = cfg.preset
        # An environment in a separate process reports missing packages itself.
        if not preset.process and importlib.util.find_spec(preset.module) is None:
            raise MissingDependencyError(
                f"env={cfg.robot} needs the package {preset.package}. Fix: pip install {preset.package}."
            )
        return apply_preset(cfg, GYM.describe(cfg.gym, context))

    def get_banner_lines(self, cfg: RobotSettings) -> list[tuple[str, str]]:
        """Return the banner line of the preset: meaning of actions, action rate and success condition."""
        preset = cfg.preset
        return [("robot", f"{preset.meaning} · {preset.rate_hz:g} actions/s · success: {preset.success}")]

    def simulators(self, cfg: RobotSettings, context: EnvContext) -> Simulators:
        """Build the simulators; each Gymnasium environment is built at its first reset."""
        sims = GYM.simulators(cfg.gym, context)
        sims.spec = apply_preset(cfg, sims.spec)
        return sims

    def make_goal_reward(self, cfg: RobotSettings) -> GoalReward:
        """Build a function that computes the rewards of relabeled goals with a single environment."""
        return GYM.make_goal_reward(cfg.gym)


def apply_preset(cfg: RobotSettings, spec: EnvSpec) -> EnvSpec:
    """Add the preset's action names and gripper convention to the spec.

    Raises EnvError if the environment differs from the preset.
    """
    preset = cfg.preset
    # With these keys, the environment may differ from the preset.
    is_changed = cfg.wrappers or cfg.kwargs or cfg.success_key
    if not is_changed and (problems := find_differences(preset, spec)):
        raise EnvError(
            f"env={cfg.robot}: the installed {preset.package} differs from the preset: {'; '.join(problems)}. "
            f"Fix: install another version of {preset.package}, or use env=gym env.id={preset.id}."
        )
    action = spec.action
    if action.controls is None and len(preset.action) == action.dim:
        controls = tuple(
            replace(control, label=f"{preset.action[control.index]} {control.label[-1]}")
            for control in get_controls(action)
        )
        action = replace(action, controls=controls)
    if preset.gripper is not None:
        open_value, closed_value = preset.gripper
        action = replace(action, gripper=GripperConvention(open=open_value, closed=closed_value))
    reward = replace(spec.reward, dense=preset.dense or spec.reward.dense)
    return replace(spec, name=cfg.robot, action=action, reward=reward)


def find_differences(preset: Preset, spec: EnvSpec) -> list[str]:
    """Return the differences between a preset and the measured spec, one line each."""
    pairs = {
        "cameras": (preset.cameras, spec.cameras.names),
        "state columns": (sum(preset.state.values()), spec.state_dim),
        "action dimensions": (len(preset.action), spec.action.dim),
        "time limit": (preset.horizon, spec.max_episode_steps),
        "reported success": (True, spec.reward.reports_success),
    }
    return [
        f"{name}: {actual}, expected {expected}" for name, (expected, actual) in pairs.items() if expected != actual
    ]


FACTORY = RobotFactory()
