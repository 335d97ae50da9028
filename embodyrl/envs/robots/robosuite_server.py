"""Server for robosuite 1.5 tasks. The script runs in a Python environment that has robosuite but not embodyrl.

Requests are (name, arguments...). Arrays are sent as (dtype, shape, bytes), which does not depend on numpy's version.
"""

import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

STATE_KEYS = ("robot0_joint_pos", "robot0_joint_vel", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
CLOSED, OPEN = 1.0, -1.0
_REACH = 0.05
"""Displacement of the gripper in meters for an action of 1."""
_GRASP_WIDTH = 0.065
"""Closed fingers count as holding a cube if the sum of their positions is below this value, in meters."""
_TRAVEL_HEIGHT = 0.08
"""Height in meters above an object at which the gripper moves horizontally."""
_GAIN = 2.0
_TURN = 0.5
"""Rotation of the gripper in rad for an action of 1."""
_TILT = 1.2
"""Tilt of the gripper towards the door in rad; the hand is too wide to grasp the handle from above."""
_HANDLE_WIDTH, _HANDLE_NEAR = 0.072, 0.04
"""Width of the closed fingers and distance from the handle, in meters, at which the gripper holds the handle."""
_UNLOCK_ANGLE = 1.0
"""Angle of the handle in rad at which the door opens."""


def pack_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Convert an array to (dtype, shape, bytes)."""
    contiguous = np.ascontiguousarray(array)
    return contiguous.dtype.str, contiguous.shape, contiguous.tobytes()


class Task:
    """Robosuite task with a Panda arm, controlled by changes of the gripper's pose at 20 Hz."""

    def __init__(self, task: str, camera: str | None, size: tuple[int, int], renders: bool, options: dict[str, Any]):
        import robosuite  # pyright: ignore[reportMissingImports]

        if not robosuite.__version__.startswith("1.5."):
            raise ImportError(f"robosuite {robosuite.__version__} is installed, but version 1.5 is required")
        self._camera, self._size = camera, size
        self._expert = _EXPERTS.get(task)
        self._env = robosuite.make(
            task,
            robots="Panda",
            has_renderer=False,
            has_offscreen_renderer=renders,
            use_camera_obs=False,
            use_object_obs=True,
            control_freq=20,
            ignore_done=True,
            # The reset id determines the episode, so sizes of objects are not sampled again.
            hard_reset=False,
            seed=0,
            **options,
        )
        self._observation_dict: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """Return the state dimension, the action bounds, and `expert`: True if the task has a scripted expert."""
        low, high = self._env.action_spec
        self._observation_dict = self._env.reset()
        return {
            "state": len(self._read_state()),
            "low": low.tolist(),
            "high": high.tolist(),
            "expert": self._expert is not None,
        }

    def reset(self, seed: int) -> Any:
        """Start an episode; the seed determines the initial state."""
        # Samplers of robots and objects share this generator.
        self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        self._observation_dict = self._env.reset()
        return self._pack_observation()

    def step(self, action: list[float]) -> Any:
        """Execute one action; return the observation, the reward and the success."""
        self._observation_dict, reward, _, _ = self._env.step(np.array(action))
        return self._pack_observation(), float(reward), bool(self._env._check_success())

    def expert(self) -> Any:
        """Return the action of the scripted expert."""
        assert self._expert is not None
        return pack_array(self._expert(self._observation_dict))

    def render(self) -> Any:
        """Return an image of the front camera, [256, 256, 3]."""
        return pack_array(self._render_image("agentview", (256, 256)))

    def _render_image(self, camera: str, size: tuple[int, int]) -> Any:
        height, width = size
        # OpenGL's first row is the lowest.
        return self._env.sim.render(camera_name=camera, height=height, width=width)[::-1]

    def _read_state(self) -> Any:
        names = STATE_KEYS if self._camera else (*STATE_KEYS, "object-state")
        return np.concatenate([np.atleast_1d(self._observation_dict[name]) for name in names])

    def _pack_observation(self) -> Any:
        image = None if self._camera is None else pack_array(self._render_image(self._camera, self._size))
        return pack_array(self._read_state()), image


def compute_lift_action(observation: Any) -> Any:
    """Return the action of the Lift expert: grasp the cube, then lift it."""
    if is_holding(observation, observation["cube_pos"]):
        return build_action((0.0, 0.0, _TRAVEL_HEIGHT), CLOSED)
    return approach_and_grasp(observation, observation["cube_pos"])


def compute_stack_action(observation: Any) -> Any:
    """Return the action of the Stack expert: grasp cube A, then put it on cube B."""
    cube, base = observation["cubeA_pos"], observation["cubeB_pos"]
    offset = base - cube + np.array([0.0, 0.0, 0.045])
    lateral_distance = np.linalg.norm(offset[:2])
    if lateral_distance < 0.02 and abs(offset[2]) < 0.008:
        # Rise once the fingers are open.
        is_open = np.abs(observation["robot0_gripper_qpos"]).sum() > _GRASP_WIDTH
        return build_action((0.0, 0.0, _TRAVEL_HEIGHT if is_open else 0.0), OPEN)
    if not is_holding(observation, cube):
        return approach_and_grasp(observation, cube)
    # Up, across, then down.
    descends, is_low = lateral_distance < 0.01, offset[2] < -0.6 * _TRAVEL_HEIGHT
    height = offset[2] if descends else offset[2] + _TRAVEL_HEIGHT
    return build_action((*(offset[:2] if descends or is_low else (0.0, 0.0)), height), CLOSED)


def compute_door_action(observation: Any) -> Any:
    """Return the action of the Door expert: grasp the handle from the front, turn it down, then pull the door."""
    offset = observation["handle_pos"] - observation["robot0_eef_pos"]
    width = np.abs(observation["robot0_gripper_qpos"]).sum()
    angle = get_tilt(observation["robot0_eef_quat"]) - _TILT
    turn = np.array([angle, 0.0, 0.0])
    distance = np.linalg.norm(offset)
    if distance < _HANDLE_NEAR and width < _HANDLE_WIDTH:
        handle_angle = float(observation["handle_qpos"])
        if handle_angle > _UNLOCK_ANGLE or observation["hinge_qpos"] > 0.02:
            return build_action((offset[0], 0.05, offset[2]), CLOSED)
        # Tangent of the arc on which the handle moves.
        return build_action(offset + 0.05 * np.array([np.sin(handle_angle), 0.0, -np.cos(handle_angle)]), CLOSED)
    if distance < 0.012:
        return build_action((0.0, 0.0, 0.0), CLOSED, turn)
    if abs(angle) > 0.2:
        return build_action((offset[0], 0.0, offset[2]), OPEN, turn)
    lateral_distance = np.linalg.norm(offset[[0, 2]])
    approaches = lateral_distance < 0.01 or (lateral_distance < 0.02 and offset[1] > -0.05)
    return build_action((offset[0], offset[1] if approaches else offset[1] + 0.12, offset[2]), OPEN, turn)


def get_tilt(quaternion: Any) -> float:
    """Return the rotation in rad of the gripper about the x axis (0: pointing down); `quaternion` is (x, y, z, w)."""
    x, y, z, w = quaternion
    return float(np.arctan2(2 * (x * w - y * z), 2 * (x * x + y * y) - 1))


def is_holding(observation: Any, cube: Any) -> bool:
    """Return True if the closed fingers hold the cube."""
    width = np.abs(observation["robot0_gripper_qpos"]).sum()
    is_still = np.abs(observation["robot0_gripper_qvel"]).max() < 0.02
    return bool(np.linalg.norm(observation["robot0_eef_pos"] - cube) < 0.02 and width < _GRASP_WIDTH and is_still)


def approach_and_grasp(observation: Any, cube: Any) -> Any:
    """Return an action that approaches the cube from above or, at the cube, closes the fingers."""
    offset = cube - observation["robot0_eef_pos"]
    lateral_distance = np.linalg.norm(offset[:2])
    if lateral_distance < 0.01 and abs(offset[2]) < 0.01:
        return build_action((0.0, 0.0, 0.0), CLOSED)
    descends = lateral_distance < 0.015 or (lateral_distance < 0.03 and offset[2] > -0.03)
    height = offset[2] if descends else offset[2] + _TRAVEL_HEIGHT
    return build_action((offset[0], offset[1], height), OPEN)


def build_action(offset: Any, gripper: float, turn: Any = (0.0, 0.0, 0.0)) -> Any:
    """Return the action that moves the gripper by `offset` [3] in meters, and rotates it by the vector `turn` [3]."""
    # The gain compensates for the controller, which hardly moves the arm for small actions.
    moves = np.clip(_GAIN * np.array(offset) / _REACH, -1.0, 1.0), np.clip(np.array(turn) / _TURN, -1.0, 1.0)
    return np.array([*np.concatenate(moves), gripper], np.float32)


_EXPERTS = {"Lift": compute_lift_action, "Stack": compute_stack_action, "Door": compute_door_action}


def serve(pipe: Any) -> None:
    """Build the task of the first request, then answer requests until the pipe closes."""
    task: Any = None
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if task is None:
                task = Task(*arguments)
                name, arguments = "describe", []
            reply: Any = ("done", getattr(task, name)(*arguments))
        except ImportError as error:
            reply = ("missing", str(error))
        except Exception as error:
            reply = ("error", f"{type(error).__name__}: {error}")
        pipe.send(reply)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
