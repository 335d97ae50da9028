"""Factory of robot presets: Gymnasium environments with declared cameras, state, action, success and horizon."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from embodyrl.controls import controls_of
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
        # A process reports its own missing packages.
        if not preset.process and importlib.util.find_spec(preset.module) is None:
            raise MissingDependencyError(
                f"env={cfg.robot} needs the package {preset.package}. Fix: pip install {preset.package}."
            )
        return _declared(cfg, GYM.describe(cfg.gym, context))

    def facts(self, cfg: RobotSettings) -> list[tuple[str, str]]:
        """Return the banner line about a preset: actions, action rate and success condition."""
        preset = cfg.preset
        return [("robot", f"{preset.meaning} · {preset.rate_hz:g} actions/s · success: {preset.success}")]

    def simulators(self, cfg: RobotSettings, context: EnvContext) -> Simulators:
        """Build the simulators; each slot's environment is built at its first reset."""
        sims = GYM.simulators(cfg.gym, context)
        sims.spec = _declared(cfg, sims.spec)
        return sims

    def judge(self, cfg: RobotSettings) -> GoalReward:
        """Build a function that computes the rewards of relabelled goals with a single environment."""
        return GYM.judge(cfg.gym)


def _declared(cfg: RobotSettings, found: EnvSpec) -> EnvSpec:
    """Add the preset's action names and gripper convention to the spec.

    Raises EnvError if the environment differs from the preset.
    """
    preset = cfg.preset
    if not cfg.wrappers and (problems := differences(preset, found)):
        raise EnvError(
            f"env={cfg.robot}: the installed {preset.package} differs from the preset: {'; '.join(problems)}. "
            f"Fix: install another version of {preset.package}, or use env=gym env.id={preset.id}."
        )
    action = found.action
    if action.controls is None and len(preset.action) == action.dim:
        labels = [f"{preset.action[one.index]} {one.label[-1]}" for one in controls_of(action)]
        action = replace(
            action,
            controls=tuple(replace(one, label=text) for one, text in zip(controls_of(action), labels, strict=True)),
        )
    if preset.gripper is not None:
        opened, closed = preset.gripper
        action = replace(action, gripper=GripperConvention(open=opened, closed=closed))
    reward = replace(found.reward, dense=preset.dense or found.reward.dense)
    return replace(found, name=cfg.robot, action=action, reward=reward)


def differences(preset: Preset, found: EnvSpec) -> list[str]:
    """Return the differences between a preset and the measured spec, one line each."""
    pairs = {
        "cameras": (preset.cameras, found.cameras.names),
        "state columns": (sum(preset.state.values()), found.state_dim),
        "action dimensions": (len(preset.action), found.action.dim),
        "time limit": (preset.horizon, found.max_episode_steps),
        "reported success": (True, found.reward.reports_success),
    }
    return [f"{name}: {actual}, expected {said}" for name, (said, actual) in pairs.items() if said != actual]


FACTORY = RobotFactory()
