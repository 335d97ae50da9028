"""Factory of ManiSkill tasks: config checks, spec and construction. Only the construction imports the simulator."""

from collections.abc import Iterator

from embodyrl.controls import build_arm_controls
from embodyrl.envs.factory import SimFactory
from embodyrl.envs.maniskill.install import Description, describe_in_subprocess
from embodyrl.envs.maniskill.settings import (
    BRIDGE_EPISODES,
    EE_DELTA_POSE,
    EXPERT_TASKS,
    ManiSkillSettings,
    ObsMode,
    SimBackend,
    get_instruction,
)
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import NUM_SEEDS
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import ConfigError
from embodyrl.registry import closest
from embodyrl.types import (
    ActionSpec,
    BenchmarkSpec,
    CameraSpec,
    EnvCosts,
    EnvSpec,
    ExpertSpec,
    GripperConvention,
    RewardSpec,
    SimulatorSpec,
)

_STEP, _TURN = 0.2, 0.5
"""Translation and rotation command of a pressed key in `embodyrl play`: 2 cm and 0.05 rad per step."""
_BATCH_BYTES, _ENV_BYTES, _PIXEL_BYTES = int(2e9), int(2e6), 64
"""Estimated GPU memory in bytes: fixed part (PhysX and renderer), per environment, and per pixel of a camera."""
_HOST_BYTES = {False: 490 << 20, True: 750 << 20}
"""Host memory in bytes of simulators without and with rendering, measured on a CPU; hardly depends on their number."""


class ManiSkillFactory(SimFactory[ManiSkillSettings]):
    """Factory of ManiSkill environments; `env.id` selects the task."""

    settings = ManiSkillSettings

    def problems(self, cfg: ManiSkillSettings) -> Iterator[str]:
        """Yield config errors that ManiSkill reports late or never."""
        if cfg.id is None:
            yield "env.id is not set. Set it to a ManiSkill task, for example env.id=PushCube-v1."
        if cfg.id in BRIDGE_EPISODES and cfg.sim_backend is SimBackend.gpu:
            yield (
                f"env.sim_backend=gpu: at each reset, env.id={cfg.id} steps the whole batch until objects settle, "
                f"which would change running episodes. Set env.sim_backend=cpu."
            )
        yield from cfg.camera_problems()
        reserved = {"num_envs", "sim_backend", "render_backend", "obs_mode", "control_mode", "reward_mode"} & {
            *cfg.kwargs
        }
        for key in sorted(reserved):
            yield f"env.kwargs.{key}={cfg.kwargs[key]} is reserved. Set it with env.{key} or env.train."
        if size_keys := _find_size_keys(cfg.kwargs.get("sensor_configs"), "env.kwargs.sensor_configs"):
            keys = ", ".join(size_keys)
            yield f"{keys}: set env.init_params.camera_heights and camera_widths instead, for all cameras."

    def describe(self, cfg: ManiSkillSettings, context: EnvContext) -> EnvSpec:
        """Return the task's spec, read in a separate process that builds the task, which takes some seconds.

        Raises:
            MissingDependencyError: ManiSkill, its Vulkan driver or an asset is missing.
            ConfigError: the task is unknown, rejects its settings, or lacks a camera.
        """
        return _build_spec(cfg, describe_in_subprocess(cfg))

    def costs(self, cfg: ManiSkillSettings, spec: EnvSpec) -> EnvCosts:
        """Estimate the host memory, and the GPU memory of a batch on a GPU."""
        pixels = len(spec.cameras.names) * spec.cameras.size[0] * spec.cameras.size[1]
        return EnvCosts(
            host_bytes=(_HOST_BYTES[pixels > 0], 0),
            gpu_bytes=(_BATCH_BYTES, _ENV_BYTES + _PIXEL_BYTES * pixels) if spec.simulator.on_gpu else (0, 0),
        )

    def simulators(self, cfg: ManiSkillSettings, context: EnvContext) -> Simulators:
        """Build one simulator per environment, at its first reset, or one batched simulator for all environments."""
        from embodyrl.envs.maniskill.sims import BatchSims, ManiSkillSims
        from embodyrl.envs.maniskill.simulator import describe

        spec = _build_spec(cfg, describe(cfg))
        return BatchSims(spec, cfg, context.num_envs) if spec.simulator.lockstep else ManiSkillSims(spec, cfg)


def _find_size_keys(sensors: object, prefix: str) -> list[str]:
    """Return the entries of `env.kwargs` that set the image size of one or all cameras."""
    configs = sensors if isinstance(sensors, dict) else {}
    names = [f"{prefix}.{key}" for key in ("height", "width") if key in configs]
    return names + [name for key, value in configs.items() for name in _find_size_keys(value, f"{prefix}.{key}")]


def _build_spec(cfg: ManiSkillSettings, description: Description) -> EnvSpec:
    name = cfg.id
    assert name is not None, "validate first"
    if description.samples_scene:
        raise ConfigError(
            f"env.sim_backend=gpu: env.id={name} samples objects only when its scene is built, once for all "
            "episodes of a batch, so a reset id would not determine the episode. Set env.sim_backend=cpu, or "
            "another env.id."
        )
    cameras = tuple(cfg.init_params.camera_names) if cfg.obs_mode is ObsMode.rgb else ()
    for camera in cameras:
        if camera not in description.cameras:
            raise ConfigError(
                f"env.init_params.camera_names: env.id={name} has no camera '{camera}'."
                f"{closest(camera, description.cameras)} Cameras: {', '.join(description.cameras)}."
            )
    uses_poses = description.control_mode == EE_DELTA_POSE
    gripper = GripperConvention(open=1.0, closed=-1.0) if description.has_gripper else None
    controls = None
    if uses_poses and gripper:  # as seen by a camera that faces the robot
        turns = ((3, _TURN), (4, _TURN), (5, _TURN))
        controls = build_arm_controls(right=(1, _STEP), away=(0, -_STEP), up=(2, _STEP), turns=turns, gripper=gripper)
    is_bridge, is_batched = name in BRIDGE_EPISODES, cfg.sim_backend is SimBackend.gpu
    return EnvSpec(
        name=name,
        action=ActionSpec(
            dim=len(description.action_low),
            gripper=gripper,
            controls=controls,
            low=description.action_low,
            high=description.action_high,
        ),
        tasks=(get_instruction(name),),
        states_per_task=(BRIDGE_EPISODES.get(name, NUM_SEEDS),),
        cameras=CameraSpec(names=cameras, size=cfg.init_params.size if cameras else (0, 0)),
        state_dim=description.state_dim,
        benchmark=BenchmarkSpec(unnorm_key="bridge_orig" if is_bridge else "maniskill" if uses_poses else None),
        max_episode_steps=description.max_episode_steps or cfg.longest_episode,
        expert=ExpertSpec(tasks=(0,) if uses_poses and not is_batched and name in EXPERT_TASKS else ()),
        reward=RewardSpec(success="info['success']", dense=cfg.reward_mode not in ("sparse", "none")),
        simulator=SimulatorSpec(lockstep=is_batched, on_gpu=is_batched),
    )


FACTORY = ManiSkillFactory()
