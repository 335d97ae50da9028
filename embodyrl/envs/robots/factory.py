"""Robot presets: Gymnasium environments with declared cameras, state, action, success and horizon."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.gym.factory import FACTORY as GYM
from embodyrl.envs.protocol import EnvContext, GoalJudge
from embodyrl.envs.robots.presets import Preset
from embodyrl.envs.robots.settings import RobotSettings
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import EnvError, MissingDependencyError
from embodyrl.extensions.controls import controls_of
from embodyrl.types import EnvSpec, GripperConvention


class RobotFactory(SimFactory[RobotSettings]):
    """Builds the environment of `env.robot` with the Gymnasium adapter."""

    settings = RobotSettings

    def problems(self, cfg: RobotSettings) -> Iterator[str]:
        """Yield errors of the Gymnasium environment's keys."""
        yield from GYM.problems(cfg.gym)

    def describe(self, cfg: RobotSettings, context: EnvContext) -> EnvSpec:
        """Describe the environment, after checking that it matches the preset.

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

    def simulators(self, cfg: RobotSettings, context: EnvContext) -> Simulators:
        """Return simulators that build one environment per slot at its first reset."""
        sims = GYM.simulators(cfg.gym, context)
        sims.spec = _declared(cfg, sims.spec)
        return sims

    def judge(self, cfg: RobotSettings) -> GoalJudge:
        """Build an environment that computes the rewards of relabelled goals."""
        return GYM.judge(cfg.gym)


def _declared(cfg: RobotSettings, found: EnvSpec) -> EnvSpec:
    """Return the spec with the names of state and action dimensions from the preset."""
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
    return replace(found, name=cfg.robot, action=action)


def differences(preset: Preset, found: EnvSpec) -> list[str]:
    """Return the differences between a preset and the environment, one line each."""
    pairs = {
        "cameras": (preset.cameras, found.cameras.names),
        "state columns": (sum(preset.state.values()), found.state_dim),
        "action dimensions": (len(preset.action), found.action.dim),
        "time limit": (preset.horizon, found.max_episode_steps),
        "reported success": (True, found.reward.reports_success),
    }
    return [f"{name} {actual} instead of {said}" for name, (said, actual) in pairs.items() if said != actual]


class HasSettings(Protocol):
    """Part of the run plan that the banner line uses."""

    env_settings: EnvSettings


def robot_facts(run_plan: HasSettings) -> list[tuple[str, str]]:
    """Return the banner line of a preset: meaning and rate of its actions, and its success condition."""
    cfg = run_plan.env_settings
    if not isinstance(cfg, RobotSettings):
        return []
    preset = cfg.preset
    return [("robot", f"{preset.meaning} · {preset.rate_hz:g} actions/s · success: {preset.success}")]


FACTORY = RobotFactory()
