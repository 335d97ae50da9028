"""Seeds, scaled actions and scripted expert for the cube of gym-hil."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from embodyrl.envs.global_state import numpy_seed
from embodyrl.types import FloatArray

_STEP = 0.025
"""Change of the target position at an action of 1, meters, as in gym-hil's own environments for teleoperation."""
_GAIN = 0.5
"""Change of the target position per meter of distance."""
_APPROACH_HEIGHT, _MAX_HORIZONTAL_ERROR, _MAX_VERTICAL_ERROR = 0.06, 0.015, 0.012
"""Height above the cube while approaching; horizontal and vertical distances in meters at which a grasp begins."""
_CLOSED_COMMAND, _CLOSING_STEP = 250.0, 0.2
"""Command of the closed gripper (255 is the maximum), and change of the command per step as a fraction of it."""


class SeedsNumpy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that seeds numpy's global generator during `reset`, because gym-hil samples initial states with it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; the seed determines the initial state, and the generator's state is restored."""
        with numpy_seed(seed):
            return self.env.reset(seed=seed, options=options)


class PandaPickActions(gymnasium.ActionWrapper[Any, Any, Any]):
    """Wrapper with actions [4] in -1..1: change of the gripper's position [3] and of its command (positive: close).

    The actions of PandaPickCube have seven dimensions: a position change of up to 1 m, rotations without effect, and a
    change of the gripper command. Useful actions cover 3 % of that range, which is too little for a policy that is
    trained on actions scaled by their range.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def action(self, action: FloatArray) -> FloatArray:
        """Return the action [7] of PandaPickCube."""
        return np.array([*(_STEP * np.asarray(action[:3])), 0, 0, 0, action[3]], np.float32)


class PandaPickExpert(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds `expert_action` to `PandaPickActions`: grasps the cube from above and lifts it.

    The expert reads the simulator's state, not observations.
    """

    def expert_action(self) -> FloatArray:
        """Return the change of the gripper's position and of its command [4]."""
        env: Any = self.env.unwrapped
        offset = env.data.sensor("block_pos").data - env.data.sensor("2f85/pinch_pos").data
        aligned = bool(np.linalg.norm(offset[:2]) < _MAX_HORIZONTAL_ERROR)
        if aligned and offset[2] > -_MAX_VERTICAL_ERROR:
            closed = float(np.ravel(env.get_gripper_pose())[0]) >= _CLOSED_COMMAND
            return np.array([0, 0, 1.0 if closed else 0.0, _CLOSING_STEP], np.float32)
        goal = offset + np.array([0.0, 0.0, 0.0 if aligned else _APPROACH_HEIGHT])
        return np.array([*np.clip(_GAIN / _STEP * goal, -1.0, 1.0), -_CLOSING_STEP], np.float32)
