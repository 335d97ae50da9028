"""Factory of the tabletop environment: config checks, spec and construction."""

from collections.abc import Iterator
from typing import Annotated

from embodyrl.config.settings import ChangesStateIds
from embodyrl.controls import build_arm_controls
from embodyrl.envs.factory import SimFactory
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import CameraSettings, EnvSettings, RewardSettings
from embodyrl.envs.tabletop.sims import CAMERAS, STATE_DIM, TabletopSims, get_suite_name
from embodyrl.envs.tabletop.views import MAX_SIZE
from embodyrl.envs.tabletop.world import TASKS, Axis
from embodyrl.types import (
    ActionSpec,
    BenchmarkSpec,
    CameraSpec,
    EnvCosts,
    EnvSpec,
    ExpertSpec,
    GripperConvention,
    SimulatorSpec,
)

STATES_PER_TASK = 4000

HORIZON = 48
"""Time limit in env steps, about twice the steps of the expert."""

MIN_IMAGE_SIZE = 32
"""Minimum height and width of an image in pixels; in smaller images, a block has less than three pixels."""


TASK_IDS = {f"Tabletop-{task}-v0": ("tabletop", f"env.eval.task_ids=[{task}]") for task in range(len(TASKS))}
"""Environment preset and config override that select a single task, by Gymnasium id."""


class TabletopSettings(EnvSettings, RewardSettings, CameraSettings):
    """Config keys for the tabletop environment."""

    axis: Annotated[Axis, ChangesStateIds] = Axis.base
    """Variation of the environment. base: none; colours: other shades; positions: plates in front; phrasings: rephrased
    instructions."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return get_suite_name(self.axis)


class TabletopFactory(SimFactory[TabletopSettings]):
    """Factory of the tabletop environment."""

    settings = TabletopSettings

    def problems(self, cfg: TabletopSettings) -> Iterator[str]:
        """Yield errors for unknown cameras, and for invalid image sizes."""
        sizes = {"camera_heights": cfg.init_params.camera_heights, "camera_widths": cfg.init_params.camera_widths}
        for key, value in sizes.items():
            if not MIN_IMAGE_SIZE <= value <= MAX_SIZE:
                bounds = f"{MIN_IMAGE_SIZE}..{MAX_SIZE}"
                yield f"env.init_params.{key}={value} is outside {bounds}, the sizes at which blocks are visible."
        if len({*sizes.values()}) > 1:
            yield (
                f"env.init_params: {' and '.join(f'{key}={value}' for key, value in sizes.items())} differ; tabletop's "
                "cameras are square. Set both to the same number."
            )
        yield from cfg.camera_problems(CAMERAS)

    def suites(self, cfg: TabletopSettings) -> tuple[str, ...]:
        """Return the names of all variations except the configured one."""
        return tuple(str(axis) for axis in Axis if axis is not cfg.axis)

    def get_configured_suite(self, cfg: TabletopSettings) -> str | None:
        """Return the name of the configured variation."""
        return str(cfg.axis)

    def describe(self, cfg: TabletopSettings, context: EnvContext) -> EnvSpec:
        """Return the spec of the tabletop environment."""
        axes = (cfg.axis, *map(Axis, context.suites))
        tasks = [(axis, task) for axis in axes for task in TASKS]
        return EnvSpec(
            simulator=SimulatorSpec(on_gpu=False, saves_state=True),
            name=get_suite_name(cfg.axis),
            action=ActionSpec(
                dim=7,
                gripper=(gripper := GripperConvention(open=-1.0, closed=1.0, binary=True)),
                # As seen by the front camera.
                controls=build_arm_controls(right=(0, 1.0), away=(1, 1.0), up=(2, 1.0), gripper=gripper),
            ),
            tasks=tuple(
                variant.rephrased_instruction if axis is Axis.phrasings else variant.instruction
                for axis, variant in tasks
            ),
            benchmark=BenchmarkSpec(
                suites=tuple(get_suite_name(axis) for axis, _ in tasks) if context.suites else (), unnorm_key="tabletop"
            ),
            states_per_task=(STATES_PER_TASK,) * len(tasks),
            cameras=CameraSpec(names=tuple(cfg.init_params.camera_names), size=cfg.init_params.size, needed=True),
            state_dim=STATE_DIM,
            max_episode_steps=HORIZON,
            expert=ExpertSpec(tasks=tuple(range(len(tasks)))),
        )

    def costs(self, cfg: TabletopSettings, spec: EnvSpec) -> EnvCosts:
        """Return the measured memory of a process's simulators, which hardly depends on their number."""
        return EnvCosts(host_bytes=(60 << 20, 0))

    def simulators(self, cfg: TabletopSettings, context: EnvContext) -> TabletopSims:
        """Build the simulators; a table is created at each reset."""
        return TabletopSims(self.describe(cfg, context))


FACTORY = TabletopFactory()
