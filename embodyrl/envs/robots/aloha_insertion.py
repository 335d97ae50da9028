"""Scripted expert of the ALOHA task insertion: both arms grasp an object, align the objects, and join them."""

from enum import IntEnum
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.robots.aloha_expert import FINGERTIP, JOINTS
from embodyrl.envs.robots.kinematics import Arm, Pose, rotation_between, rotation_matrix
from embodyrl.types import DoubleArray

mujoco: Any = _mujoco

_STEP, _CAREFUL_STEP, _TURN = 0.006, 0.004, 0.06
"""Maximum distances in meters before and after the grasp, and maximum angle in rad, by which the target of a gripper
moves in a step."""
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
"""Decrease of that distance per step."""
_GAIN = 0.1
"""Fraction of the error of an object's pose by which a gripper's target moves in a step; objects swing above 0.15."""
_MAX_DISTANCE_ERROR, _MAX_ANGLE_ERROR = 0.004, 0.06
"""Insertion starts below these errors of the peg relative to the socket: distance in meters, angle in rad."""
_RIGHT_ORIENTATION = rotation_matrix((0, 0, 1), np.pi) @ rotation_matrix((0, 1, 0), np.pi / 3)
_LEFT_ORIENTATION = rotation_matrix((0, 1, 0), np.pi / 3)
"""Orientations of the grippers: they point inwards, 60 degrees down, and close horizontally."""


class Phase(IntEnum):
    """Stages of an insertion, in order."""

    approach = 0
    lower = 1
    close = 2
    lift = 3
    align = 4
    insert = 5


class InsertionExpert:
    """Expert of insertion: the left arm holds the socket, and the right arm inserts the peg.

    After the grasp, the targets of the grippers follow the measured poses of the objects.
    """

    def __init__(self, model: Any, data: Any) -> None:
        """Read the state of the simulation from `data`, a MuJoCo MjData that is never changed."""
        self._data, self._measured, self._planned = data, mujoco.MjData(model), mujoco.MjData(model)
        self._arms = [
            Arm(model, f"vx300s_{side}/gripper_link", [f"vx300s_{side}/{joint}" for joint in JOINTS], FINGERTIP)
            for side in ("left", "right")
        ]
        self._columns = [model.joint(name).qposadr[0] for name in ("blue_socket_joint", "red_peg_joint")]
        self.reset()

    def reset(self) -> None:
        """Start an episode in the current state of the simulation."""
        self._phase, self._phase_steps, self._gap = Phase.approach, 0, _INITIAL_DISTANCE
        self._planned.qpos[:] = self._data.qpos
        self._targets = [arm.pose(self._planned) for arm in self._arms]
        self._object_positions = [pose.position for pose in self._get_object_poses()]

    def action(self) -> DoubleArray:
        """Return the joint targets [14] for the current state; call it once per step."""
        self._measured.qpos[:] = self._data.qpos
        objects = self._get_object_poses()
        self._update_phase(objects)
        goals = self._get_goals(objects)
        step = _STEP if self._phase < Phase.align else _CAREFUL_STEP
        self._targets = [
            current.move_towards(goal_pose, step, _TURN)
            for current, goal_pose in zip(self._targets, goals, strict=True)
        ]
        opening = float(self._phase < Phase.close)
        joints = [arm.solve(self._planned, goal) for arm, goal in zip(self._arms, self._targets, strict=True)]
        return np.concatenate([joints[0], [opening], joints[1], [opening]])

    def _get_object_poses(self) -> list[Pose]:
        """Return the poses of socket and peg."""
        poses = []
        for column in self._columns:
            matrix = np.zeros(9)
            mujoco.mju_quat2Mat(matrix, self._data.qpos[column + 3 : column + 7])
            poses.append(Pose(self._data.qpos[column : column + 3].copy(), matrix.reshape(3, 3)))
        return poses

    def _update_phase(self, objects: list[Pose]) -> None:
        """Select the stage."""
        self._phase_steps += 1
        socket, peg = objects
        if self._phase is Phase.approach:  # the objects fall onto the table first
            self._object_positions = [socket.position, peg.position]
        target_pose = Pose(socket.position + np.array([self._gap, 0.0, 0.0]), socket.rotation)
        if self._phase in (Phase.approach, Phase.lower, Phase.lift):
            max_distance = 0.006 if self._phase is Phase.lower else 0.015
            poses = [arm.pose(self._measured) for arm in self._arms]
            done = all(
                pose.is_near(goal, max_distance, 0.1)
                for pose, goal in zip(poses, self._get_goals(objects), strict=True)
            )
        elif self._phase is Phase.close:
            done = self._phase_steps == _CLOSING_STEPS
        else:
            done = self._phase is Phase.align and peg.is_near(target_pose, _MAX_DISTANCE_ERROR, _MAX_ANGLE_ERROR)
        if self._phase is Phase.insert:
            self._gap = max(_FINAL_DISTANCE, self._gap - _INSERTION_STEP)
        if done:
            self._phase, self._phase_steps = Phase(self._phase + 1), 0

    def _get_goals(self, objects: list[Pose]) -> list[Pose]:
        """Return the goals of the left and the right gripper in the current stage."""
        if self._phase <= Phase.lift:
            height = {Phase.approach: _APPROACH_OFFSET, Phase.lift: _LIFT_OFFSET}.get(self._phase, np.zeros(3))
            pairs = zip(self._object_positions, _GRASP_OFFSETS, (_LEFT_ORIENTATION, _RIGHT_ORIENTATION), strict=True)
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
        """Return the target of a gripper, moved by a part of the error of the object that the gripper holds."""
        shift = _GAIN * (target_pose.position - object_pose.position)
        rotation = rotation_between(object_pose.rotation, target_pose.rotation)
        return Pose(
            target.position + shift,
            rotation_matrix(rotation, _GAIN * float(np.linalg.norm(rotation))) @ target.rotation,
        )
