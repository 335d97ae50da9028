"""Construction and resets of ManiSkill tasks in this process."""

import contextlib
import functools
import gc
import importlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.envs.global_state import suppress_output
from embodyrl.envs.maniskill.install import INSTALL, VULKAN_FIX, Description
from embodyrl.envs.maniskill.settings import BRIDGE_EPISODES, HAND_CAMERA, ManiSkillSettings, ObsMode, SimBackend
from embodyrl.envs.meshes import decimate, get_reduced_copy, merge_vertices
from embodyrl.envs.settings import RenderProfile
from embodyrl.errors import ConfigError, EmbodyError, MissingDependencyError, UnknownNameError, one_line
from embodyrl.registry import closest

MAX_FACES = 400
"""Maximum number of triangles per part of a mesh; a robot link has about a dozen parts."""


@contextlib.contextmanager
def load_lean_visuals() -> Iterator[None]:
    """Make SAPIEN's builders load reduced copies of GLB meshes inside this context."""
    from sapien.wrapper.actor_builder import ActorBuilder  # pyright: ignore[reportMissingImports]

    original = ActorBuilder.add_visual_from_file

    def add_visual(self: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(filename)
        if path.suffix.lower() == ".glb":
            path = get_reduced_copy(path, f"{MAX_FACES} faces", ".glb", _reduce_mesh)
        return original(self, str(path), *args, **kwargs)

    ActorBuilder.add_visual_from_file = add_visual
    try:
        yield
    finally:
        ActorBuilder.add_visual_from_file = original


def _reduce_mesh(path: Path) -> bytes:
    import trimesh  # pyright: ignore[reportMissingImports]
    from trimesh.visual import TextureVisuals  # pyright: ignore[reportMissingImports]

    scene: Any = trimesh.load(path, force="scene")
    for name, part in list(scene.geometry.items()):
        if len(part.faces) <= MAX_FACES:
            continue
        uv, faces = getattr(part.visual, "uv", None), np.asarray(part.faces)
        textured = uv is not None and len(uv) == len(part.vertices)
        texture = (np.asarray(uv, np.float32), faces) if textured else None
        mesh = merge_vertices(np.asarray(part.vertices, np.float32), faces, texture)
        reduced = decimate(mesh, MAX_FACES)
        visual = TextureVisuals(
            uv=reduced.texcoord if textured else None, material=getattr(part.visual, "material", None)
        )
        scene.geometry[name] = trimesh.Trimesh(
            reduced.position, reduced.faces, vertex_normals=reduced.normal, visual=visual, process=False
        )
    return scene.export(file_type="glb", include_normals=True)


_FRAME_PIXELS = 320
"""Side of a video frame, in pixels."""

_HAND_CAMERA_PIXELS = 128

_VULKAN_ERRORS = ("ErrorIncompatibleDriver", "supported physical device", "rendering device", "createInstance")


def build(cfg: ManiSkillSettings, obs_mode: ObsMode, num_envs: int = 1) -> Any:
    """Build one environment of the task, or a batch of `num_envs`, without Gymnasium's wrappers.

    Raises:
        MissingDependencyError: a package, asset or the Vulkan driver is missing.
        UnknownNameError: the task does not exist.
        ConfigError: the task rejects its settings.
    """
    task = _find_task(cfg)
    size = {"height": cfg.init_params.camera_heights, "width": cfg.init_params.camera_widths}
    rgb = "rgb+segmentation" if cfg.id in BRIDGE_EPISODES else "rgb"
    settings = {
        "num_envs": num_envs,
        "sim_backend": "physx_cpu" if cfg.sim_backend is SimBackend.cpu else "physx_cuda",
        "render_backend": cfg.sim_backend.value,
        "obs_mode": rgb if obs_mode is ObsMode.rgb else "state",
        "control_mode": cfg.control_mode,
        "reward_mode": cfg.reward_mode,
        "human_render_camera_configs": {"height": _FRAME_PIXELS, "width": _FRAME_PIXELS, "shader_pack": "minimal"},
    }
    try:
        with suppress_output(), _use_lean_visuals(cfg):
            # `env.kwargs` comes last, because it may replace all arguments except the reserved ones (`problems`).
            sensors = {**size, "shader_pack": "minimal", **cfg.kwargs.get("sensor_configs", {})}
            return task.cls(**{**task.default_kwargs, **settings, **cfg.kwargs, "sensor_configs": sensors})
    except (EOFError, SystemExit) as error:
        raise MissingDependencyError(
            f"env.id={cfg.id}: robot files are missing. Fix: python -m mani_skill.utils.download_asset {cfg.id}"
        ) from error
    except (RuntimeError, OSError, AssertionError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, EmbodyError):
            raise
        text = one_line(error)
        if any(pattern in text for pattern in _VULKAN_ERRORS):
            raise MissingDependencyError(f"ManiSkill needs a Vulkan driver: {text}. Fix: {VULKAN_FIX}") from error
        raise ConfigError(
            f"env.id={cfg.id} cannot be built with sim_backend={cfg.sim_backend.value}, obs_mode={obs_mode.value}, "
            f"control_mode={cfg.control_mode}, reward_mode={cfg.reward_mode}, kwargs={dict(cfg.kwargs)}: {text}. "
            "Correct these keys."
        ) from error


def restart(cfg: ManiSkillSettings, env: Any, reset_id: int, cameras: tuple[str, ...]) -> dict[str, Any]:
    """Start the episode of a reset id (a seed, or a placement number for Bridge tasks); return the info.

    The scene is built again, because PhysX keeps state across ManiSkill's resets (the order of contacts, sleeping
    bodies), so that results would depend on earlier episodes.
    """
    placement = {"episode_id": reset_id} if cfg.id in BRIDGE_EPISODES else {}
    return _reset(cfg, env, [reset_id], cameras, {"reconfigure": True, **placement})


def restart_rows(
    cfg: ManiSkillSettings, env: Any, reset_ids: Mapping[int, int], cameras: tuple[str, ...]
) -> dict[str, Any]:
    """Reset rows of a batch to the episodes of their reset ids; return the info.

    ManiSkill samples all rows from the first row's seed, so that an episode depends on the other rows. This function
    samples each row from its own seed; the expensive parts of a reset on the GPU run once for all rows.
    """
    initialize = env._initialize_episode

    def initialize_each(rows: Any, options: dict[str, Any]) -> None:
        reset_mask = env.scene._reset_mask
        for row, reset_id in zip(rows, reset_ids.values(), strict=True):
            env.scene._reset_mask = torch.zeros_like(reset_mask)
            env.scene._reset_mask[row] = True
            env._episode_rng = np.random.RandomState(reset_id)
            torch.manual_seed(reset_id)
            initialize(row[None], options)
        env.scene._reset_mask = reset_mask

    env._initialize_episode = initialize_each
    try:
        rows = torch.tensor(list(reset_ids), device=env.device)
        return _reset(cfg, env, list(reset_ids.values()), cameras, {"env_idx": rows})
    finally:
        del env._initialize_episode


def _reset(
    cfg: ManiSkillSettings, env: Any, seeds: list[int], cameras: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any]:
    if cfg.obs_mode is ObsMode.rgb:
        # Resets and steps would render all cameras; `observe` renders those of the spec when needed.
        env._obs_mode = "none"
    with suppress_output(), _use_lean_visuals(cfg):
        info = env.reset(seed=seeds, options=options)[1]
    for camera in [name for name in env.scene.sensors if name not in cameras]:
        del env.scene.sensors[camera]
    return info


def describe(cfg: ManiSkillSettings) -> Description:
    """Build a task, and return its properties; the task is closed afterwards.

    Raises:
        EmbodyError: see `build`.
    """
    # Use the state mode, because rendering takes seconds; Bridge tasks support only images.
    env = build(cfg, ObsMode.rgb if cfg.id in BRIDGE_EPISODES else ObsMode.state)
    try:
        agent, space = env.agent, env.single_action_space
        if not hasattr(space, "low"):
            raise ConfigError(f"env.id={cfg.id}: the action space is {space}; only tasks with one robot are supported.")
        return Description(
            control_mode=agent.control_mode,
            action_low=tuple(float(bound) for bound in space.low),
            action_high=tuple(float(bound) for bound in space.high),
            has_gripper="gripper" in getattr(agent.controller, "controllers", {}),
            state_dim=get_state(env, cfg.obs_mode, env.get_info()).shape[1],
            cameras=tuple(env.scene.sensors),
            max_episode_steps=_find_task(cfg).max_episode_steps or 0,
            samples_scene=cfg.sim_backend is SimBackend.gpu and samples_scene(env),
        )
    finally:
        env.close()


def samples_scene(env: Any) -> bool:
    """Return True if building the scene samples objects, sizes or colors."""
    reconfigure, has_sampled = env._reconfigure, []

    def reconfigure_and_compare(options: dict[str, Any]) -> None:
        states_before = _get_generator_states(env)
        reconfigure(options)
        has_sampled.append(_get_generator_states(env) != states_before)

    # Replace the method of this object only, so that other environments in the process keep the original method.
    env._reconfigure = reconfigure_and_compare
    try:
        with suppress_output():
            env.reset(seed=0, options={"reconfigure": True})
    finally:
        del env._reconfigure
    return any(has_sampled)


def _get_generator_states(env: Any) -> list[bytes]:
    """Return the states of all random generators that tasks use."""
    torch_states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
    numpy_states = [np.random.get_state(), *(rng.get_state() for rng in env._batched_episode_rng.rngs)]
    return [torch_state.numpy().tobytes() for torch_state in torch_states] + [
        repr(state[1:3]).encode() + state[1].tobytes() for state in numpy_states
    ]


def get_state(env: Any, mode: ObsMode, info: dict[str, Any]) -> Any:
    """Return the state [N, S]: all observations of the task, or only joint angles and hand pose if there are images."""
    from mani_skill.utils import common  # pyright: ignore[reportMissingImports]

    if mode is ObsMode.state:
        return common.flatten_state_dict(env._get_obs_state_dict(info), use_torch=True)
    parts = {"joints": env.agent.robot.get_qpos()}
    if (hand := getattr(env.agent, "tcp_pose", None)) is not None:
        parts["hand"] = hand.raw_pose
    return common.flatten_state_dict(parts, use_torch=True)


def _find_task(cfg: ManiSkillSettings) -> Any:
    """Return the task's entry in ManiSkill's registry, after checking that its asset files exist."""
    _prepare_process()
    from mani_skill.utils import assets, registration  # pyright: ignore[reportMissingImports]

    name = cfg.id
    assert name is not None, "validate first"
    if name not in registration.REGISTERED_ENVS:
        raise UnknownNameError(
            f"env.id={name} is not a ManiSkill task.{closest(name, registration.REGISTERED_ENVS)} "
            "All: https://maniskill.readthedocs.io/en/latest/tasks/"
        )
    task = registration.REGISTERED_ENVS[name]
    missing = [
        source
        for group in task.asset_download_ids or ()
        for source in (
            assets.expand_data_group_into_individual_data_source_ids(group) if group in assets.DATA_GROUPS else [group]
        )
        if not assets.is_data_source_downloaded(source)
    ]
    if missing:
        raise MissingDependencyError(
            f"env.id={name}: assets {', '.join(missing)} are missing from {assets.DATA_SOURCES[missing[0]].output_dir}."
            f" Fix: python -m mani_skill.utils.download_asset {name}"
        )
    return task


@functools.cache
def _prepare_process() -> None:
    try:
        with suppress_output():
            importlib.import_module("mani_skill.envs")  # registers the tasks
            from mani_skill.agents.robots import Panda  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError.from_import_error("ManiSkill", error, INSTALL) from error
    logging.getLogger("mani_skill").setLevel(logging.ERROR)
    robot: Any = Panda
    robot._sensor_configs = property(_get_hand_camera)
    # ManiSkill runs the garbage collector for each scene, which takes 150 ms, or 1 ms if the objects of all imports are
    # frozen.
    gc.collect()
    gc.freeze()


def _get_hand_camera(panda: Any) -> list[Any]:
    """Return the camera config of the plain Panda: a wrist camera, like `panda_wristcam` without the housing."""
    import sapien  # pyright: ignore[reportMissingImports]
    from mani_skill.sensors.camera import CameraConfig  # pyright: ignore[reportMissingImports]

    pose: Any = sapien.Pose(p=[0.0464982, -0.0200011, 0.0360011], q=[0, 0.70710678, 0, 0.70710678])
    side, hand = _HAND_CAMERA_PIXELS, panda.robot.links_map["panda_hand"]
    return [
        CameraConfig(uid=HAND_CAMERA, pose=pose, width=side, height=side, fov=1.5708, near=0.01, far=100, mount=hand)
    ]


def _use_lean_visuals(cfg: ManiSkillSettings) -> contextlib.AbstractContextManager[None]:
    return load_lean_visuals() if cfg.render_profile is RenderProfile.lean else contextlib.nullcontext()
