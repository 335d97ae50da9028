"""Tasks of gym-aloha that also support object poses as observations, and render only the requested images.

The package renders three images of 480 x 640 pixels in every step, even without a camera in the observation.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
from dm_control.mujoco import Physics  # pyright: ignore[reportMissingImports]
from dm_control.rl import control  # pyright: ignore[reportMissingImports]
from dm_control.rl.control import PhysicsError  # pyright: ignore[reportMissingImports]
from gym_aloha import constants, utils  # pyright: ignore[reportMissingImports]
from gym_aloha.tasks import sim  # pyright: ignore[reportMissingImports]
from gymnasium import spaces

from embodyrl.envs.robots.aloha_expert import TransferExpert
from embodyrl.envs.robots.aloha_insertion import InsertionExpert


class _StateObservation(sim.BimanualViperXTask):
    """Base class of tasks whose observation omits the images, because rendering is slow."""

    def get_observation(self, physics: Any) -> Mapping[str, Any]:
        """Return the joint positions and the object poses."""
        return {"qpos": self.get_qpos(physics), "env_state": self.get_env_state(physics)}


class _TransferCube(_StateObservation, sim.TransferCubeTask):
    pass


class _Insertion(_StateObservation, sim.InsertionTask):
    pass


def _sample_insertion_poses(seed: int | None) -> np.ndarray:
    return np.concatenate(utils.sample_insertion_pose(seed))


_TASKS = {
    "transfer_cube": (_TransferCube, utils.sample_box_pose, 7, TransferExpert),
    "insertion": (_Insertion, _sample_insertion_poses, 14, InsertionExpert),
}


class AlohaEnv(gymnasium.Env[Any, np.ndarray]):
    """Environment with two ViperX arms (ALOHA, arXiv 2304.13705) and the tasks of gym-aloha.

    Dynamics, rewards and initial states are those of gym-aloha.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": constants.FPS}

    def __init__(
        self,
        task: str,
        camera: str | None = None,
        observation_height: int = 480,
        observation_width: int = 640,
        render_mode: str | None = None,
    ) -> None:
        """Load the scene of the task.

        Args:
            task: transfer_cube or insertion.
            camera: camera of the observation (top, angle or front_close); None: the observation contains object poses.
            observation_height: height of the image, pixels.
            observation_width: width of the image, pixels.
            render_mode: rgb_array, or None.
        """
        task_class, self._sample, num_poses, expert = _TASKS[task]
        self.render_mode = render_mode
        self._camera, self._size = camera, (observation_height, observation_width)
        self._last_observation: Mapping[str, Any] = {}
        self._renderers: dict[tuple[int, int], Any] = {}
        scene = constants.ASSETS_DIR / f"bimanual_viperx_{task}.xml"
        self._env = control.Environment(
            Physics.from_xml_path(str(scene)), task_class(), float("inf"), control_timestep=constants.DT
        )
        joint_space = spaces.Box(-1000.0, 1000.0, (len(constants.JOINTS),), np.float64)
        space: Any = spaces.Box(-np.inf, np.inf, (num_poses,), np.float64)
        if camera is not None:
            space = spaces.Dict({camera: spaces.Box(0, 255, (*self._size, 3), np.uint8)})
        self.observation_space = spaces.Dict(
            {"agent_pos": joint_space, "env_state" if camera is None else "pixels": space}
        )
        self.action_space = self._build_action_space()
        self._expert = expert(self._env.physics.model.ptr, self._env.physics.data.ptr)
        self.expert_action = self._expert.compute_action

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the seed determines the object poses."""
        super().reset(seed=seed)
        # gym-aloha's tasks read the poses from this list.
        sim.BOX_POSE[0] = self._sample(seed)
        self._last_observation = self._env.reset().observation
        self._expert.reset()
        return self._build_observation(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute one action [14] of joint targets; success or an unstable simulation ends the episode."""
        try:
            _, reward, _, self._last_observation = self._env.step(action)
        except PhysicsError:  # for example if the arms are pressed together; returns the previous observation
            return self._build_observation(), 0.0, True, False, {"is_success": False}
        success = reward == self._env.task.max_reward
        return self._build_observation(), float(reward or 0), success, False, {"is_success": success}

    def render(self) -> np.ndarray:
        """Return an image of the camera `top`, [480, 640, 3] uint8."""
        return self._render_image("top", (480, 640))

    def close(self) -> None:
        """Free the renderers; idempotent."""
        while self._renderers:
            self._renderers.popitem()[1].close()

    def _build_action_space(self) -> spaces.Box:
        """Return the box of joint targets [14]; gym-aloha declares -1..1, but does not clip its actions."""
        low, high = self._env.physics.model.actuator_ctrlrange.T
        # A gripper has two actuators, one for each finger, but one target in 0..1.
        low, high = ([*bounds[:6], gripper, *bounds[8:14], gripper] for bounds, gripper in ((low, 0.0), (high, 1.0)))
        return spaces.Box(np.array(low, np.float32), np.array(high, np.float32))

    def _render_image(self, camera: str, size: tuple[int, int]) -> np.ndarray:
        # Not the renderer of the package, which starts a thread and prints errors at exit; the pixels are equal.
        physics = self._env.physics
        if size not in self._renderers:
            self._renderers[size] = mujoco.Renderer(physics.model.ptr, *size)
        renderer = self._renderers[size]
        renderer.update_scene(physics.data.ptr, camera=camera)
        return renderer.render()

    def _build_observation(self) -> dict[str, Any]:
        joints = self._last_observation["qpos"]
        if self._camera is None:
            return {"agent_pos": joints, "env_state": self._last_observation["env_state"]}
        return {"agent_pos": joints, "pixels": {self._camera: self._render_image(self._camera, self._size)}}
