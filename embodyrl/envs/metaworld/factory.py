"""Factory of MetaWorld environments (arXiv 1910.10897), from the package metaworld 3.0.0."""

import importlib.util
import os
from collections.abc import Iterator

from embodyrl.controls import build_arm_controls
from embodyrl.envs.factory import SimFactory
from embodyrl.envs.metaworld.settings import BENCHMARKS, HIDDEN_GOALS, PROPRIOCEPTION, STATE, TASKS, MetaWorldSettings
from embodyrl.envs.mujoco_rendering import choose_renderer, set_egl_device
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import NUM_SEEDS
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import MissingDependencyError
from embodyrl.registry import closest
from embodyrl.specs import EnvCosts
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, ExpertSpec, GripperConvention, RewardSpec

CAMERAS = ("corner", "corner2", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")

_LIBRARY_BYTES, _SIMULATOR_BYTES, _IDLE_BYTES = 184 << 20, {False: 30 << 20, True: 96 << 20}, 2 << 30
"""Memory of libraries, of a simulator without and with rendering (measured), and of all idle simulators of a process.
Building a simulator takes as long as about 100 steps."""


class MetaWorldFactory(SimFactory[MetaWorldSettings]):
    """Factory of the MetaWorld tasks that `env.id` selects."""

    settings = MetaWorldSettings

    def problems(self, cfg: MetaWorldSettings) -> Iterator[str]:
        """Yield config errors that MetaWorld reports late or never."""
        if unknown := [name for name in cfg.names if name not in TASKS]:
            hint = closest(unknown[0], [*BENCHMARKS, *TASKS])
            yield f"env.id={unknown[0]} is not a task or benchmark of MetaWorld.{hint}"
        yield from cfg.camera_problems(CAMERAS if cfg.pixels else None)

    def describe(self, cfg: MetaWorldSettings, context: EnvContext) -> EnvSpec:
        """Return the spec of the tasks, without importing MetaWorld.

        Raises:
            MissingDependencyError: the package is missing.
        """
        if importlib.util.find_spec("metaworld") is None:
            raise MissingDependencyError(
                "env=metaworld needs the package metaworld, which is not installed. Fix: pip install metaworld==3.0.0 "
                "(3.1 has additional dependencies)."
            )
        names, params = cfg.names, cfg.init_params
        num_task_columns = len(names) if len(names) > 1 else 0
        return EnvSpec(
            name=f"metaworld {cfg.id}",
            action=ActionSpec(
                dim=4,
                gripper=(gripper := GripperConvention(open=-1.0, closed=1.0)),
                controls=build_arm_controls(right=(1, 1.0), away=(0, -1.0), up=(2, 1.0), gripper=gripper),
            ),
            tasks=tuple(TASKS[name] for name in names),
            states_per_task=(NUM_SEEDS,) * len(names),
            cameras=CameraSpec(
                names=tuple(params.camera_names) if cfg.pixels else (),
                size=params.size if cfg.pixels else (0, 0),
                rotation_deg=180 if cfg.pixels else 0,  # MetaWorld's cameras are mounted upside down
                needed=cfg.pixels,
            ),
            state_dim=PROPRIOCEPTION if cfg.pixels else STATE + num_task_columns,
            max_episode_steps=500,
            expert=ExpertSpec(tasks=tuple(range(len(names)))),
            reward=RewardSpec(success="info['success']", dense=True),
        )

    def costs(self, cfg: MetaWorldSettings, spec: EnvSpec) -> EnvCosts:
        """Estimate the memory of the simulators, including idle simulators of other tasks."""
        size, num_tasks = _SIMULATOR_BYTES[cfg.pixels], _count_tasks(cfg)
        idle_bytes = min(num_tasks * size, _IDLE_BYTES) if num_tasks > 1 else 0
        return EnvCosts(host_bytes=(_LIBRARY_BYTES + idle_bytes, size * min(num_tasks, 2)))

    def simulators(self, cfg: MetaWorldSettings, context: EnvContext) -> Simulators:
        """Build the simulators; a task's simulator is built when an environment first runs the task."""
        # MuJoCo reads MUJOCO_GL when it is imported.
        os.environ.setdefault("MUJOCO_GL", choose_renderer().backend)
        set_egl_device()
        from embodyrl.envs.metaworld.sims import MetaWorldSims

        return MetaWorldSims(
            self.describe(cfg, context),
            cfg,
            hides_goal=cfg.id in HIDDEN_GOALS,
            renders=context.renders_images,
            max_idle=min(context.num_envs + _count_tasks(cfg), _IDLE_BYTES // _SIMULATOR_BYTES[cfg.pixels]),
        )


def _count_tasks(cfg: MetaWorldSettings) -> int:
    return max((len(split.task_ids or cfg.names) for split in cfg.splits.values()), default=len(cfg.names))


FACTORY = MetaWorldFactory()
