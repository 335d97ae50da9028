"""Scripted experts for FetchPush and FetchPickAndPlace."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from embodyrl.types import DoubleArray, FloatArray

_GAIN = 26.0
"""Action per meter of distance; an action of 1 moves the target of the gripper by 5 cm."""
_HEIGHT, _CLEARANCE = 0.42, 0.09
"""Height of the gripper while it pushes, and height above it while it moves around the block, meters."""
_PUSH_OFFSET, _START_RADIUS = 0.08, 0.025
"""Distance in meters between the block and the start of a push; a start below 2.5 cm away counts as reached."""
_GOAL_RADIUS = 0.01
"""A push ends if the block is less than 1 cm from the goal, in meters."""
_MAX_HORIZONTAL_ERROR, _MAX_VERTICAL_ERROR = 0.02, 0.015
"""A grasp begins below 2 cm of horizontal and 1.5 cm of vertical distance."""
_GRASP_WIDTH = 0.056
"""Sum of the finger positions in meters below which the fingers hold the block."""


class _FetchExpert(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Wrapper that stores the observation for `expert_action`."""

    def observation(self, observation: dict[str, DoubleArray]) -> dict[str, DoubleArray]:
        """Store the observation, and return it unchanged."""
        self._observation = observation
        return observation


class FetchPushExpert(_FetchExpert):
    """Wrapper that adds `expert_action` to FetchPush: moves over the block to its far side, then pushes to the goal."""

    def expert_action(self) -> FloatArray:
        """Return the change of the gripper's position and the opening of the closed fingers [4]."""
        gripper, block, goal = (
            self._observation["observation"][:3],
            self._observation["achieved_goal"],
            self._observation["desired_goal"],
        )
        to_goal = (goal - block)[:2]
        distance = float(np.linalg.norm(to_goal))
        forward = to_goal / max(distance, 1e-9)
        offset = gripper[:2] - block[:2]
        along = float(offset @ forward)
        lateral_offset = offset - along * forward
        is_low = gripper[2] < _HEIGHT + 0.02
        if distance < _GOAL_RADIUS:
            return _build_action(gripper, gripper, -1.0)
        if is_low and -0.12 < along < -0.02 and np.linalg.norm(lateral_offset) < 0.02:
            step = min(0.05, 0.02 + 0.3 * distance)
            return _build_action(
                np.array([*(gripper[:2] + step * forward - 0.8 * lateral_offset), _HEIGHT]), gripper, -1.0
            )
        start = block[:2] - _PUSH_OFFSET * forward
        if np.linalg.norm(start - gripper[:2]) < _START_RADIUS:
            return _build_action(np.array([*start, _HEIGHT]), gripper, -1.0)
        rises = gripper[2] < _HEIGHT + 0.06 and np.linalg.norm(offset) < 0.09
        return _build_action(np.array([*(gripper[:2] if rises else start), _HEIGHT + _CLEARANCE]), gripper, -1.0)


class FetchPickExpert(_FetchExpert):
    """Wrapper that adds `expert_action` to FetchPickAndPlace: grasps the block from above and moves it to the goal."""

    def expert_action(self) -> FloatArray:
        """Return the change of the gripper's position and the opening of the fingers [4]."""
        state, block = self._observation["observation"], self._observation["achieved_goal"]
        gripper, fingers = state[:3], float(state[9:11].sum())
        offset = block - gripper
        aligned = bool(np.linalg.norm(offset[:2]) < _MAX_HORIZONTAL_ERROR)
        if aligned and abs(offset[2]) < _MAX_VERTICAL_ERROR:
            return _build_action(
                self._observation["desired_goal"] - offset if fingers < _GRASP_WIDTH else gripper, gripper, -1.0
            )
        if aligned:
            return _build_action(block, gripper, 1.0)
        rises = gripper[2] < block[2] + 0.05
        return _build_action(np.array([*(gripper if rises else block)[:2], block[2] + 0.08]), gripper, 1.0)


def _build_action(target: DoubleArray, gripper: DoubleArray, opening: float) -> FloatArray:
    """Return the action [4] that moves the gripper towards a target position [3]."""
    return np.array([*np.clip(_GAIN * (target - gripper), -1.0, 1.0), opening], np.float32)
