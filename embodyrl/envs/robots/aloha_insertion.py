"""Scripted expert of the ALOHA task insertion: both arms grasp an object, align the objects, and join them."""

from enum import IntEnum
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.robots.aloha_expert import RIGHT_ORIENTATION, STEP, BimanualExpert
from embodyrl.envs.robots.kinematics import Pose, rotation_between, rotation_matrix
from embodyrl.types import DoubleArray

mujoco: Any = _mujoco

_CAREFUL_STEP = 0.004
"""Maximum motion in meters of a gripper's target per step after the grasp; before the grasp, the maximum is `STEP`."""
_APPROACH_OFFSET, _LIFT_OFFSET = np.array([0.0, 0.0, 0.08]), np.array([0.0, 0.0, 0.2])
_GRASP_OFFSETS = np.array([[-0.015, 0.0, 0.003], [0.015, 0.0, 0.011]])
"""Positions in meters of the left and right gripper relative to the centers of socket and peg. Fingers that touch the
table do not close."""
_CLOSING_STEPS = 8
_MEETING_POINT = np.array([-0.06, 0.5, 0.25])
"""Position in meters to which the left arm carries the socket."""
_INITIAL_DISTANCE, _FINAL_DISTANCE = 0.18, 0.085
"""Distances in meters between the centers of socket and peg before and after insertion; the pin is touched at 0.1."""
_INSERTION_STEP = 0.002
"""Decrease in meters of the distance between the centers per step."""
_GAIN = 0.1
"""Fraction of the error of an object's pose by which a gripper's target moves in a step; objects swing above 0.15."""
_MAX_DISTANCE_ERROR, _MAX_ANGLE_ERROR = 0.004, 0.06
"""Insertion starts below these errors of the peg relative to the socket: distance in meters, angle in rad."""
_LEFT_ORIENTATION = rotation_matrix((0, 1, 0), np.pi / 3)
"""Orientation of the left gripper: it points to the right arm, 60 degrees down, and closes horizontally."""


class Phase(IntEnum):
    """Phases of an insertion, in order."""

    approach = 0
    lower = 1
    close = 2
    lift = 3
    align = 4
    insert = 5


class InsertionExpert(BimanualExpert):
    """Scripted expert of the task insertion: the left arm holds the socket, and the right arm inserts the peg.

    After the grasp, the targets of the grippers follow the measured poses of the objects.
    """

    def reset(self) -> None:
        """Start an episode in the current state of the simulation."""
        super().reset()
        self._phase, self._gap = Phase.approach, _INITIAL_DISTANCE
        self._object_positions = [pose.position for pose in self._get_object_poses()]

    def compute_action(self) -> DoubleArray:
        """Return the joint targets [14] for the current state; call it once per step."""
        objects = self._get_object_poses()
        self._update_phase(objects)
        step = STEP if self._phase < Phase.align else _CAREFUL_STEP
        left_joints, right_joints = self._move_towards(self._get_goals(objects), step)
        opening = float(self._phase < Phase.close)
        return np.concatenate([left_joints, [opening], right_joints, [opening]])

    def _get_object_poses(self) -> list[Pose]:
        """Return the poses of socket and peg."""
        poses = []
        for name in ("blue_socket_joint", "red_peg_joint"):
            matrix, pose = np.zeros(9), self._data.joint(name).qpos
            mujoco.mju_quat2Mat(matrix, pose[3:])
            poses.append(Pose(pose[:3].copy(), matrix.reshape(3, 3)))
        return poses

    def _update_phase(self, objects: list[Pose]) -> None:
        """Start the next phase if the current phase is finished."""
        self._phase_steps += 1
        socket, peg = objects
        if self._phase is Phase.approach:  # the objects fall onto the table first
            self._object_positions = [socket.position, peg.position]
        target_pose = Pose(socket.position + np.array([self._gap, 0.0, 0.0]), socket.rotation)
        if self._phase in (Phase.approach, Phase.lower, Phase.lift):
            max_distance = 0.006 if self._phase is Phase.lower else 0.015
            pairs = zip(self._measure(), self._get_goals(objects), strict=True)
            done = all(pose.is_near(goal, max_distance, 0.1) for pose, goal in pairs)
        elif self._phase is Phase.close:
            done = self._phase_steps == _CLOSING_STEPS
        else:
            done = self._phase is Phase.align and peg.is_near(target_pose, _MAX_DISTANCE_ERROR, _MAX_ANGLE_ERROR)
        if self._phase is Phase.insert:
            self._gap = max(_FINAL_DISTANCE, self._gap - _INSERTION_STEP)
        if done:
            self._phase, self._phase_steps = Phase(self._phase + 1), 0

    def _get_goals(self, objects: list[Pose]) -> list[Pose]:
        """Return the goals of the left and the right gripper in the current phase."""
        if self._phase <= Phase.lift:
            height = {Phase.approach: _APPROACH_OFFSET, Phase.lift: _LIFT_OFFSET}.get(self._phase, np.zeros(3))
            pairs = zip(self._object_positions, _GRASP_OFFSETS, (_LEFT_ORIENTATION, RIGHT_ORIENTATION), strict=True)
            return [Pose(position + offset + height, rotation) for position, offset, rotation in pairs]
        socket = objects[0]
        target_poses = [
            Pose(_MEETING_POINT, np.eye(3)),
            Pose(socket.position + np.array([self._gap, 0.0, 0.0]), socket.rotation),
        ]
        return [
            self._correct_target(*arguments) for arguments in zip(self._targets, objects, target_poses, strict=True)
        ]

    def _correct_target(self, target: Pose, object_pose: Pose, target_pose: Pose) -> Pose:
        """Return the target of a gripper, moved by a fraction of the pose error of the held object."""
        shift = _GAIN * (target_pose.position - object_pose.position)
        rotation = rotation_between(object_pose.rotation, target_pose.rotation)
        return Pose(
            target.position + shift,
            rotation_matrix(rotation, _GAIN * float(np.linalg.norm(rotation))) @ target.rotation,
        )
