"""Scripted experts of ALOHA: base class with inverse kinematics, and the expert of the task transfer_cube."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.robots.kinematics import Arm, Pose, rotation_matrix
from embodyrl.types import DoubleArray

mujoco: Any = _mujoco

_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
_FINGERTIP = 0.137
"""Distance in meters from the last link to the middle of the fingertips."""
STEP, _TURN = 0.006, 0.06
"""Maximum distance in meters and angle in rad by which the target of a gripper moves in a step."""
_MEETING_POINT = np.array([0.0, 0.5, 0.25])
"""Position in meters to which the right arm carries the cube."""
_APPROACH_OFFSET = np.array([0.0, 0.0, 0.08])
_GRASP_OFFSET_RIGHT = np.array([0.0, 0.0, 0.003])
_WAIT_OFFSET = np.array([-0.12, 0.0, 0.0])
_GRASP_OFFSET_LEFT = np.array([-0.012, 0.0, 0.0])
"""Offsets in meters of the left gripper from the cube: its fingers overlap the cube's left part."""
_CLOSING_STEPS = 20
_CLOSING_SPEED = 0.04
"""Decrease of the left gripper's target per step; demonstrations end at the first touch, so it closes slowly."""
_DROP_DISTANCE = 0.05
"""Distance in meters between right gripper and cube from which the cube counts as dropped."""
RIGHT_ORIENTATION = rotation_matrix((0, 0, 1), np.pi) @ rotation_matrix((0, 1, 0), np.pi / 3)
"""Orientation of the right gripper: it points to the left arm, 60 degrees down, and closes horizontally."""
_LEFT_ORIENTATION = rotation_matrix((1, 0, 0), np.pi / 2)
"""Orientation of the left gripper: it points to the right arm and closes vertically."""


class Phase(IntEnum):
    """Phases of a transfer, in order."""

    approach = 0
    lower = 1
    close = 2
    carry = 3
    reach = 4
    grasp = 5


class BimanualExpert:
    """Base class of scripted experts for two arms; the grippers move towards goal poses."""

    def __init__(self, model: Any, data: Any) -> None:
        """Read the state of the simulation from `data`, a MuJoCo MjData that is never changed."""
        self._data, self._measured, self._planned = data, mujoco.MjData(model), mujoco.MjData(model)
        self._arms = [
            Arm(model, f"vx300s_{side}/gripper_link", [f"vx300s_{side}/{joint}" for joint in _JOINTS], _FINGERTIP)
            for side in ("left", "right")
        ]
        self.reset()

    def reset(self) -> None:
        """Start an episode in the current state of the simulation."""
        self._phase_steps = 0
        # Targets move at a constant speed from here; the joints follow them at different speeds.
        self._planned.qpos[:] = self._data.qpos
        self._targets = [arm.compute_pose(self._planned) for arm in self._arms]

    def _measure(self) -> list[Pose]:
        """Return the current poses of the left and the right gripper."""
        self._measured.qpos[:] = self._data.qpos
        return [arm.compute_pose(self._measured) for arm in self._arms]

    def _move_towards(self, goals: Sequence[Pose], step: float) -> list[DoubleArray]:
        """Move the targets of both grippers by up to `step` meters, and return the joint angles [6] of each arm."""
        pairs = zip(self._targets, goals, strict=True)
        self._targets = [target.move_towards(goal, step, _TURN) for target, goal in pairs]
        return [
            arm.solve_joint_angles(self._planned, target) for arm, target in zip(self._arms, self._targets, strict=True)
        ]


class TransferExpert(BimanualExpert):
    """Scripted expert of transfer_cube: the right arm lifts the cube and hands it to the left arm."""

    def reset(self) -> None:
        """Start an episode in the current state of the simulation."""
        super().reset()
        self._phase, self._cube_position = Phase.approach, np.zeros(3)

    def compute_action(self) -> DoubleArray:
        """Return the joint targets [14] for the current state; call it once per step."""
        cube = self._data.joint("red_box_joint").qpos[:3].copy()
        self._update_phase(cube, *self._measure())
        left_joints, right_joints = self._move_towards(self._get_goals(cube), STEP)
        closing = _CLOSING_SPEED * self._phase_steps if self._phase is Phase.grasp else 0.0
        return np.concatenate([left_joints, [max(0.0, 1 - closing)], right_joints, [self._phase < Phase.close]])

    def _update_phase(self, cube: DoubleArray, left: Pose, right: Pose) -> None:
        """Select the phase; after the cube was dropped, start again with the first phase."""
        if self._phase > Phase.close and np.linalg.norm(cube - right.position) > _DROP_DISTANCE:
            self._phase, self._phase_steps = Phase.approach, 0
        if self._phase is Phase.approach:
            self._cube_position = cube
        self._phase_steps += 1
        left_goal, right_goal = self._get_goals(cube)
        done = {
            Phase.approach: right.is_near(right_goal, 0.01, 0.1),
            Phase.lower: right.is_near(right_goal, 0.006, 0.1),
            Phase.close: self._phase_steps == _CLOSING_STEPS,
            Phase.carry: right.is_near(right_goal, 0.02, 0.1),
            Phase.reach: left.is_near(left_goal, 0.02, 0.1),
        }
        if done.get(self._phase):
            self._phase, self._phase_steps = Phase(self._phase + 1), 0

    def _get_goals(self, cube: DoubleArray) -> tuple[Pose, Pose]:
        """Return the goals of the left and the right gripper in the current phase."""
        left = cube + _GRASP_OFFSET_LEFT if self._phase >= Phase.reach else _MEETING_POINT + _WAIT_OFFSET
        right = _MEETING_POINT
        if self._phase < Phase.carry:
            right = self._cube_position + (_APPROACH_OFFSET if self._phase is Phase.approach else _GRASP_OFFSET_RIGHT)
        return Pose(left, _LEFT_ORIENTATION), Pose(right, RIGHT_ORIENTATION)
