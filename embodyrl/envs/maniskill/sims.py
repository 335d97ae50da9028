"""Simulators and scripted experts for ManiSkill tasks; simulators on the CPU share the renderer and shaders."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.envs.maniskill.settings import ManiSkillSettings
from embodyrl.envs.maniskill.simulator import build, get_state, restart, restart_rows
from embodyrl.envs.simulators import SequentialSimulators, SimStep, SimSteps, Simulators
from embodyrl.types import ByteArray, DoubleArray, EnvSpec, FloatArray, IntArray, ObservationOut

_ACTION_UNIT = 0.1
"""Meters and radians per unit of an action."""

_TRAVEL_HEIGHT = 0.06
"""Height in meters above a cube at which the hand moves horizontally."""

_OPEN, _CLOSED = 1.0, -1.0


class Expert:
    """Scripted expert for one episode; needs at most 50 steps, the time limit of the tasks."""

    def __init__(self, env: Any, name: str) -> None:
        self._env = env
        plans: dict[str, Callable[[], DoubleArray]] = {
            "PickCube-v1": self._plan_pick,
            "StackCube-v1": self._plan_stack,
            "PushCube-v1": lambda: self._plan_push(forward=1.0),
            "PullCube-v1": lambda: self._plan_push(forward=-1.0),
        }
        self._plan_action = plans[name]
        self._is_in_place = False
        """True if the hand is behind the cube (push and pull tasks), or if the cube is on the other cube
        (StackCube)."""
        self._num_waiting_steps = 0

    def act(self) -> FloatArray:
        """Return the next action [7] in -1..1."""
        return np.clip(self._plan_action(), -1.0, 1.0).astype(np.float32)

    @property
    def _hand_position(self) -> DoubleArray:
        return _get_position(self._env.agent.tcp)

    def _plan_pick(self) -> DoubleArray:
        env = self._env
        if bool(env.agent.is_grasping(env.cube)[0]):
            return _move_towards(_get_position(env.cube), _get_position(env.goal_site), _CLOSED, speed=0.6)
        return self._plan_grasp(env.cube)

    def _plan_grasp(self, cube: Any) -> DoubleArray:
        hand, target = self._hand_position, _get_position(cube)
        # A cube is symmetric under a quarter turn. The hand points down, so its yaw has the opposite direction.
        turn = (_get_yaw(cube) - _get_yaw(self._env.agent.tcp) + np.pi / 4) % (np.pi / 2) - np.pi / 4
        is_off_target = np.linalg.norm(hand[:2] - target[:2]) > 0.012
        if is_off_target and hand[2] < target[2] + 0.04:
            action = _move_towards(hand, [*hand[:2], target[2] + _TRAVEL_HEIGHT], _OPEN)
        elif is_off_target:
            action = _move_towards(hand, [*target[:2], target[2] + _TRAVEL_HEIGHT], _OPEN)
        elif hand[2] > target[2] + 0.008:
            action = _move_towards(hand, target, _OPEN)
        else:
            return _move_towards(hand, hand, _CLOSED)
        action[5] = 0.5 * np.clip(turn / _ACTION_UNIT, -1.0, 1.0)
        return action

    def _plan_stack(self) -> DoubleArray:
        env, hand = self._env, self._hand_position
        cube, base = _get_position(env.cubeA), _get_position(env.cubeB)
        offset = cube - base
        horizontal_error = np.linalg.norm(offset[:2])
        # The side of a cube is 0.04 m.
        is_stacked = horizontal_error < 0.012 and abs(offset[2] - 0.04) < 0.006
        is_held = bool(env.agent.is_grasping(env.cubeA)[0])
        if self._is_in_place or (is_stacked and is_held):
            self._is_in_place = True
            self._num_waiting_steps += 1
            offset_up = [0.0, 0.0, 0.05 if self._num_waiting_steps > 2 else 0.0]
            return _move_towards(hand, hand + offset_up, _OPEN, speed=0.5)
        if not is_held:
            return self._plan_grasp(env.cubeA)
        if horizontal_error > 0.008 and offset[2] < 0.055:
            goal = [cube[0], cube[1], base[2] + 0.075]
        elif horizontal_error > 0.008:
            goal = [base[0], base[1], base[2] + 0.07]
        else:
            goal = [base[0], base[1], base[2] + 0.042]
        return _move_towards(cube, goal, _CLOSED, speed=0.5)

    def _plan_push(self, forward: float) -> DoubleArray:
        """Return the action that moves the closed hand behind the cube, then pushes the cube along x to the target."""
        hand, cube, goal = self._hand_position, _get_position(self._env.obj), _get_position(self._env.goal_region)
        height = 0.02 if forward > 0 else 0.03
        start = np.array([cube[0] - forward * 0.06, cube[1], height])
        if not self._is_in_place:
            distance = np.linalg.norm(hand[:2] - start[:2])
            is_behind = (hand[0] - cube[0]) * forward < -0.03
            self._is_in_place = bool(np.linalg.norm(hand - start) < 0.02)
            must_rise = distance > (0.025 if is_behind else 0.02)
            return _move_towards(hand, [start[0], start[1], 0.11] if must_rise else start, _CLOSED)
        return _move_towards(hand, [hand[0] + goal[0] - cube[0], cube[1], height], _CLOSED, speed=0.5)


def _move_towards(start: DoubleArray, goal: npt.ArrayLike, gripper: float, *, speed: float = 1.0) -> DoubleArray:
    """Return an action [7] that moves the hand towards `goal`, with each component limited to `speed`."""
    delta = (np.asarray(goal) - start) / _ACTION_UNIT
    largest = np.abs(delta).max()
    action = np.zeros(7)
    action[:3] = delta if largest <= speed else delta * (speed / largest)
    action[6] = gripper
    return action


def _get_position(body: Any) -> DoubleArray:
    return body.pose.p[0].double().numpy()


def _get_yaw(body: Any) -> float:
    """Return the heading of the body's x axis, rad."""
    w, x, y, z = body.pose.q[0].tolist()
    return float(np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z)))


class _BaseSims(Simulators):
    """Base class of ManiSkillSims and BatchSims, which render a frame only if it is observed or recorded."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings) -> None:
        super().__init__(spec)
        self._cfg = cfg

    def _build_results(self, env: Any, reward: Any, terminated: Any, info: dict[str, Any]) -> SimSteps:
        """Return the results of a step for all environments of a batch."""
        success = info.get("success", terminated & False)
        # With reward_mode=none, tasks return no reward; the success is used.
        rewards = success if env.reward_mode == "none" else reward
        terminated_array, success_array = terminated.cpu().numpy(), success.cpu().numpy()
        return SimSteps(
            reward=rewards.cpu().numpy().astype(np.float64),
            terminated=terminated_array,
            success=success_array,
            truncated=np.zeros(len(terminated_array), np.bool_),
        )

    def _read_observations(self, env: Any, info: dict[str, Any]) -> list[np.ndarray]:
        """Return a list: the states [N, S], then the images [N, H, W, 3] of each camera."""
        sensor_data = env._get_obs_sensor_data() if self.spec.cameras.names else {}
        tensors = [
            get_state(env, self._cfg.obs_mode, info),
            *(sensor_data[camera]["rgb"] for camera in self.spec.cameras.names),
        ]
        return [tensor.cpu().numpy() for tensor in tensors]


class ManiSkillSims(_BaseSims, SequentialSimulators):
    """Simulators of one task, one per environment."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings) -> None:
        super().__init__(spec, cfg)
        self._envs: dict[int, Any] = {}
        self._infos: dict[int, dict[str, Any]] = {}
        self._experts: dict[int, Expert] = {}

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        """Start the episode of the reset id, which is the seed of all randomness."""
        if env_index not in self._envs:
            self._envs[env_index] = build(self._cfg, self._cfg.obs_mode)
        self._infos[env_index] = restart(self._cfg, self._envs[env_index], reset_id, self.spec.cameras.names)
        self.record_solved_start(env_index, solved=bool(_get_row(self._infos[env_index], 0).get("success", False)))
        self._experts.pop(env_index, None)

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        """Execute one action [A], clipped by ManiSkill to the action bounds."""
        _, reward, terminated, _, self._infos[env_index] = self._envs[env_index].step(action)
        step = self._build_results(self._envs[env_index], reward, terminated, self._infos[env_index])
        return SimStep(reward=float(step.reward[0]), terminated=bool(step.terminated[0]), success=bool(step.success[0]))

    def expert(self, env_index: int) -> FloatArray:
        """Return the expert's next action [7]; a new expert is created at the start of each episode."""
        if env_index not in self._experts:
            self._experts[env_index] = Expert(self._envs[env_index], self.spec.name)
        return self._experts[env_index].act()

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        """Write the camera images and the state vector into the arrays of `out`."""
        observations = self._read_observations(self._envs[env_index], self._infos[env_index])
        out.state[:] = observations[0][0]
        for image, camera_images in zip(out.images, observations[1:], strict=True):
            image[...] = camera_images[0]

    def render(self, env_index: int) -> ByteArray:
        """Return a frame of ManiSkill's video camera."""
        return self._envs[env_index].render_rgb_array()[0].numpy()

    def info(self, env_index: int) -> dict[str, Any]:
        """Return the values of ManiSkill's `evaluate()` by name."""
        return _get_row(self._infos[env_index], 0)

    def close(self) -> None:
        """Free the simulators; idempotent."""
        while self._envs:
            self._envs.popitem()[1].close()


class BatchSims(_BaseSims):
    """Simulators whose environments are one batched simulation, which steps all environments together."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings, num_envs: int) -> None:
        super().__init__(spec, cfg)
        self._env: Any = build(cfg, cfg.obs_mode, num_envs)
        self._actions = np.zeros((num_envs, spec.action.dim), np.float32)
        self._info: dict[str, Any] = {}
        self._observations: list[np.ndarray] = []

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Start an episode in each environment; the reset ids are the seeds of all randomness."""
        reset_id_by_env = dict(zip(env_indices.tolist(), reset_ids.tolist(), strict=True))
        self._info = restart_rows(self._cfg, self._env, reset_id_by_env, self.spec.cameras.names)
        for env_index in reset_id_by_env:
            self.record_solved_start(env_index, solved=bool(_get_row(self._info, env_index).get("success", False)))
        self._observations = []

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        """Step the whole batch; environments without an action repeat their last action."""
        self._actions[env_indices] = actions
        _, reward, terminated, _, self._info = self._env.step(self._actions)
        self._observations = []
        return self._build_results(self._env, reward, terminated, self._info).select(env_indices)

    def observe(self, env_indices: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observations of the environments; images are rendered once for all environments."""
        if not self._observations:
            self._observations = self._read_observations(self._env, self._info)
        state[rows] = self._observations[0][env_indices]
        for camera, camera_images in enumerate(self._observations[1:]):
            images[rows, camera] = camera_images[env_indices]

    def render(self, env_index: int) -> ByteArray:
        """Return a frame of ManiSkill's video camera."""
        return self._env.render_rgb_array()[env_index].cpu().numpy()

    def info(self, env_index: int) -> dict[str, Any]:
        """Return the values of ManiSkill's `evaluate()` for the environment, by name."""
        return _get_row(self._info, env_index)

    def close(self) -> None:
        """Free the batch; idempotent."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _get_row(info: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: value[row].tolist() if getattr(value, "ndim", 0) else value for name, value in info.items()}
