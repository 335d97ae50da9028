"""Scripted expert for the cube of gym-hil."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from embodyrl.types import FloatArray

_GAIN, _FASTEST = 0.5, 0.03
"""Change of the target position per metre of distance, and its maximum in metres."""
_ABOVE, _ALIGNED, _LOW = 0.06, 0.015, 0.012
"""Height above the cube while approaching; horizontal and vertical distances in metres at which a grasp begins."""
_CLOSED, _CLOSING = 250.0, 0.2
"""Command of the closed gripper (255 is the maximum), and change of the command per step as a fraction of it."""


class PandaPickExpert(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds `expert_action` to PandaPickCube: grasps the cube from above and lifts it.

    The expert reads the simulator's state, not observations.
    """

    def expert_action(self) -> FloatArray:
        """Return changes of the gripper's position, rotation (zero) and closing [7]."""
        env: Any = self.env.unwrapped
        offset = env.data.sensor("block_pos").data - env.data.sensor("2f85/pinch_pos").data
        aligned = bool(np.linalg.norm(offset[:2]) < _ALIGNED)
        if aligned and offset[2] > -_LOW:
            closed = float(np.ravel(env.get_gripper_pose())[0]) >= _CLOSED
            return np.array([0, 0, _FASTEST if closed else 0.0, 0, 0, 0, _CLOSING], np.float32)
        goal = offset + np.array([0.0, 0.0, 0.0 if aligned else _ABOVE])
        move = np.clip(_GAIN * goal, -_FASTEST, _FASTEST)
        return np.array([*move, 0, 0, 0, -_CLOSING], np.float32)
