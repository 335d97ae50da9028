"""Factory of LIBERO environments: config checks, spec and construction. Only the construction imports the simulator."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import ChangesStateIds
from embodyrl.controls import build_arm_controls
from embodyrl.envs.factory import SimFactory, get_max_tasks_in_memory
from embodyrl.envs.libero import install
from embodyrl.envs.libero.plus import PLUS_AXES, get_variant, remove_plus_axis
from embodyrl.envs.mujoco_rendering import choose_renderer
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import CameraSettings, EnvSettings, RenderProfile, RewardSettings
from embodyrl.envs.simulators import Simulators
from embodyrl.registry import closest
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

SUITE_TASKS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}

AXES = ("object", "swap", "lan", "task")
"""Perturbations of LIBERO-PRO (arXiv 2510.03827) for the four suites of ten tasks: another object to pick, swapped
object positions, a rephrased instruction, another task."""

ALL_AXES = (*AXES, *PLUS_AXES)

BASE = "base"
"""Name of the additional suite that contains the unperturbed tasks of a perturbed suite."""

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Step limits of the OpenVLA-OFT evaluation (the longest demonstration, rounded up), without settle steps."""

CAMERAS = ("agentview", "robot0_eye_in_hand")

STATE_DIM = 8

TASK_BYTES = {RenderProfile.full: int(2.6e9), RenderProfile.lean: int(0.4e9)}
"""Upper estimate of the resident memory of one loaded task in bytes, by render profile."""

HOST_BYTES = {RenderProfile.full: (600 << 20, 1350 << 20), RenderProfile.lean: (450 << 20, 180 << 20)}
"""Measured memory of simulator and renderer libraries, and of one loaded task (full: 1.0 to 1.6 GB), in bytes."""

TASK_GPU_BYTES = {RenderProfile.full: int(0.45e9), RenderProfile.lean: int(0.1e9)}
"""Estimated memory in bytes of a loaded task on the rendering GPU: textures (up to 194 MB of RGB, times 16/9 for alpha
and mipmaps), meshes (up to 0.4 million triangles of 96 bytes) and frame buffers."""

PHYSICS_S = {False: 0.139, True: 0.034}
"""Measured CPU seconds for the physics of a chunk of 8 actions, by `fast_physics`."""
RENDER_S = {RenderProfile.full: 0.071, RenderProfile.lean: 0.013}
"""Measured CPU seconds for software rendering of an image of 224 x 224 pixels, by render profile."""
EGL_RENDER_S = 0.0016
"""Measured seconds for rendering an image on an H100; several processes on one GPU are not faster than one process."""

CONTEXT_BYTES = int(0.2e9)
"""Estimated GPU memory of an OpenGL context in bytes."""

EXPERT_TASKS: dict[str, tuple[int, ...]] = {
    **{f"libero_{name}_{axis}": tuple(range(10)) for name in ("object", "spatial") for axis in AXES},
    "libero_object": tuple(range(10)),
    "libero_spatial": tuple(range(10)),
    "libero_goal": (1, 2, 4, 6, 8, 9),
    "libero_10": (0, 7),
}
"""Ids of the tasks with a scripted expert, by suite: tasks that need only pick and place (no drawer, knob or push)."""


_REPHRASED_SUITES = frozenset(f"{suite}_{axis}" for suite in SUITE_TASKS for axis in ("lan", "task"))
"""Suites whose instructions are read from the task descriptions, because the file names equal the base suite's."""


def chunk_name(profile: RenderProfile, *, fast: bool, on_gpu: bool) -> str:
    """Return the name under which the chunk time of this configuration is stored (see `EnvCosts.chunk_name`)."""
    return f"LIBERO, {profile} rendering, {'fast' if fast else 'stock'} physics, {'EGL' if on_gpu else 'OSMesa'}"


TELEOP_STEP, TELEOP_TURN = 1.0, 0.5
"""Translation and rotation command of a pressed key in `embodyrl play`: about 12 mm or 3 degrees per step.

Faster rotations also move the hand sideways."""


SUITES = {suite: (suite, BASE) for suite in SUITE_TASKS} | {
    f"{suite}_{axis}": (suite, axis) for suite in SUITE_TASKS if suite != "libero_90" for axis in ALL_AXES
}
"""Base suite and perturbation of each suite."""


def _build_task_ids() -> dict[str, tuple[str, str]]:
    """Return {Gymnasium id: config overrides} of single tasks, such as `LIBERO-object-0-v0`."""
    ids = {}
    for suite, (base, axis) in SUITES.items():
        name = base.removeprefix("libero_")
        if axis == BASE:
            option, title = suite, f"LIBERO-{name}"
        else:
            family = "PRO" if axis in AXES else "Plus"
            option, title = f"libero_{family.lower()}_{name}_{axis}", f"LIBERO-{family}-{name}-{axis}"
        for task in range(SUITE_TASKS[base]):
            ids[f"{title}-{task}-v0"] = option, f"env.eval.task_ids=[{task}]"
    return ids


TASK_IDS = _build_task_ids()


def _get_instructions(tasks: list[tuple[str, int]], instructions: list[str], count: int) -> tuple[str, ...]:
    """Return the instruction of each of `count` states per task; empty if instructions depend only on the task."""
    if not any(name.endswith("_language") for name, _ in tasks):
        return ()
    pairs = zip(tasks, instructions, strict=True)
    variants = ((get_variant(*task, state)[0], default) for task, default in pairs for state in range(count))
    return tuple((variant and variant.instruction) or default for variant, default in variants)


ExpertGrasps = StrEnum("ExpertGrasps", ["varied", "nearest"])
SettleGripper = StrEnum("SettleGripper", ["open", "hold"])
TextureColorspace = StrEnum("TextureColorspace", ["linear", "auto"])


class LiberoSettings(EnvSettings, RewardSettings, CameraSettings):
    """Config keys for LIBERO."""

    former_values = {"texture_colorspace": "auto"}

    task_suite_name: Annotated[str | None, ChangesStateIds] = None
    """Suite of LIBERO, LIBERO-PRO or LIBERO-Plus, for example libero_spatial, libero_spatial_swap or
    libero_spatial_camera."""
    render_profile: RenderProfile = RenderProfile.full
    """full: pixel-identical to the benchmark; lean: simplified meshes and textures for software rendering, same
    physics."""
    texture_colorspace: TextureColorspace = TextureColorspace.linear
    """Interpretation of texture colors. linear: as in MuJoCo up to 3.3.2, with which published data and checkpoints
    were made; auto: as in MuJoCo 3.3.3 and later, which decode the sRGB chunk of PNG textures, so that these textures
    are darker (two floors and the salad dressing)."""
    fast_physics: bool | None = None
    """If true, the physics loop omits redundant computations; results equal the benchmark's up to rounding. null: true
    with render_profile=lean."""
    sampled_states: Annotated[int, Field(ge=0, le=10**6), ChangesStateIds] = 0
    """Number of additional initial states per task, numbered from 50, for evaluation on unseen states; the benchmark's
    own sampler generates these states."""
    settle_steps: Annotated[int, Field(ge=1, le=1000), ChangesStateIds] = 10
    """Number of simulator steps after each reset, in which objects settle: 10 in the OpenVLA-OFT evaluation, 15 in
    RLinf."""
    settle_gripper: Annotated[SettleGripper, ChangesStateIds] = SettleGripper.open
    """Gripper command in the settling steps: open (the OpenVLA-OFT evaluation) or hold (no command)."""
    expert_grasps: ExpertGrasps = ExpertGrasps.varied
    """Grasp selection of the scripted expert. varied: a different collision-free grasp in each episode; nearest: the
    grasp that rotates the hand least, which is easier to learn for policies that predict the actions of a chunk
    independently."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return self.task_suite_name or self.env_type

    @property
    def is_fast(self) -> bool:
        """True if the fast physics loop is used."""
        return self.render_profile is RenderProfile.lean if self.fast_physics is None else self.fast_physics


class LiberoFactory(SimFactory[LiberoSettings]):
    """Factory of the LIBERO suite that `env.task_suite_name` names."""

    settings = LiberoSettings
    restores_states = True

    def problems(self, cfg: LiberoSettings) -> Iterator[str]:
        """Yield errors about unknown suites and cameras."""
        name = cfg.task_suite_name
        suffixes = ", ".join(f"_{axis}" for axis in ALL_AXES)
        known = f"{', '.join(sorted(SUITE_TASKS))}; all except libero_90 also with a suffix: {suffixes}"
        if name is None:
            yield f"env.task_suite_name is not set; the LIBERO suites are {known}."
        elif name not in SUITES:
            yield f"env.task_suite_name={name} is not a LIBERO suite.{closest(name, sorted(SUITES))} Known: {known}."
        yield from cfg.camera_problems(CAMERAS)

    def suites(self, cfg: LiberoSettings) -> tuple[str, ...]:
        """Return the other suites: `base` and the perturbations; empty if the suite has no perturbations."""
        own = self.get_configured_suite(cfg)
        return tuple(name for name in (BASE, *ALL_AXES) if name != own) if own else ()

    def get_configured_suite(self, cfg: LiberoSettings) -> str | None:
        """Return `base` or the configured perturbation; None if the suite has no perturbations."""
        base, axis = SUITES.get(cfg.task_suite_name or "", (None, None))
        return None if base == "libero_90" else axis

    def describe(self, cfg: LiberoSettings, context: EnvContext) -> EnvSpec:
        """Return the spec from the benchmark's task lists, without starting a simulator.

        Raises:
            MissingDependencyError: LIBERO, its assets, a working mujoco version or the OpenGL library is missing.
        """
        install.check_installation()
        on_gpu = choose_renderer().backend == "egl"
        suite = cfg.task_suite_name
        assert suite is not None, "validate first"
        base = SUITES[suite][0]
        suites = (suite, *(base if name == BASE else f"{base}_{name}" for name in context.suites))
        tasks = [(name, number) for name in suites for number in range(SUITE_TASKS[base])]
        instructions = [
            instruction
            for name in suites
            for instruction in install.read_instructions(name, in_description=name in _REPHRASED_SUITES)
        ]
        count = install.STATES_PER_TASK + cfg.sampled_states
        return EnvSpec(
            name=suite,
            action=ActionSpec(
                dim=7,
                gripper=(gripper := GripperConvention(open=-1.0, closed=1.0, binary=True)),
                controls=build_arm_controls(
                    right=(1, TELEOP_STEP),
                    away=(0, -TELEOP_STEP),
                    up=(2, TELEOP_STEP),
                    turns=((3, TELEOP_TURN), (4, TELEOP_TURN), (5, TELEOP_TURN)),
                    gripper=gripper,
                ),
            ),
            tasks=tuple(instructions),
            instructions=_get_instructions(tasks, instructions, count),
            benchmark=BenchmarkSpec(
                suites=tuple(name for name, _ in tasks) if len(suites) > 1 else (), unnorm_key=f"{base}_no_noops"
            ),
            states_per_task=(count,) * len(tasks),
            cameras=CameraSpec(names=tuple(cfg.init_params.camera_names), size=cfg.init_params.size, rotation_deg=180),
            state_dim=STATE_DIM,
            max_episode_steps=HORIZONS[base],
            expert=ExpertSpec(
                tasks=tuple(
                    k for k, (name, task) in enumerate(tasks) if task in EXPERT_TASKS.get(remove_plus_axis(name), ())
                ),
                reacts=False,
            ),
            simulator=SimulatorSpec(on_gpu=on_gpu, saves_state=True),
            seeded_tasks=tuple(k for k, (name, task) in enumerate(tasks) if task in install.find_seeded_tasks(name)),
        )

    def costs(self, cfg: LiberoSettings, spec: EnvSpec) -> EnvCosts:
        """Estimate memory and time from measurements of the renderer and the physics."""
        on_gpu = bool(spec.simulator.on_gpu)
        return EnvCosts(
            task_bytes=TASK_BYTES[cfg.render_profile],
            host_bytes=HOST_BYTES[cfg.render_profile],
            gpu_bytes=(CONTEXT_BYTES, TASK_GPU_BYTES[cfg.render_profile]) if on_gpu else (0, 0),
            chunk_s=PHYSICS_S[cfg.is_fast] + (EGL_RENDER_S if on_gpu else RENDER_S[cfg.render_profile]),
            gpu_s=EGL_RENDER_S * len(spec.cameras.names) if on_gpu else 0.0,
            chunk_name=chunk_name(cfg.render_profile, fast=cfg.is_fast, on_gpu=on_gpu),
        )

    def simulators(self, cfg: LiberoSettings, context: EnvContext) -> Simulators:
        """Build the simulators; the model of a task is loaded when an environment first runs the task."""
        spec = self.describe(cfg, context)
        install.prepare_process()
        from embodyrl.envs.libero.sims import LiberoSims

        lean = cfg.render_profile is RenderProfile.lean
        max_in_memory = get_max_tasks_in_memory(TASK_BYTES[cfg.render_profile], context.num_workers)
        # Unused models would only fill the GPU.
        max_models = min(max_in_memory, context.num_envs) if spec.simulator.on_gpu else max_in_memory
        sims = LiberoSims(
            spec,
            max_models=max_models,
            lean=lean,
            linear=cfg.texture_colorspace is TextureColorspace.linear,
            fast=cfg.is_fast,
            nearest=cfg.expert_grasps is ExpertGrasps.nearest,
            settle_steps=cfg.settle_steps,
            settle_open=cfg.settle_gripper is SettleGripper.open,
            initial_states=context.initial_states,
        )
        # The first reset of a new installation compiles code for many seconds, so reset once when a worker starts.
        task = next((split.task_ids[0] for split in cfg.splits.values() if split.task_ids), 0)
        sims.reset_env(0, spec.get_reset_ids(task).start, 0)
        return sims


FACTORY = LiberoFactory()
