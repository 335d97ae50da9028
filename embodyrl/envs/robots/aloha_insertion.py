"""Scripted expert of the ALOHA task insertion: both arms grasp an object, align the objects, and join them."""

from enum import IntEnum
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.robots.aloha_expert import FINGERTIP, JOINTS
from embodyrl.envs.robots.kinematics import Arm, Pose, rotated, rotation_between
from embodyrl.types import DoubleArray

mujoco: Any = _mujoco

_STEP, _CAREFUL, _TURN = 0.006, 0.004, 0.06
"""Maximum distances in metres before and after the grasp, and maximum angle in rad, by which the target of a gripper
moves in a step."""
_ABOVE, _LIFTED = np.array([0.0, 0.0, 0.08]), np.array([0.0, 0.0, 0.2])
_GRASPS = np.array([[-0.015, 0.0, 0.003], [0.015, 0.0, 0.011]])
"""Positions in metres of the left and right gripper relative to the centres of socket and peg. Fingers that touch the
table do not close."""
_CLOSING_STEPS = 8
_MEETING = np.array([-0.06, 0.5, 0.25])
"""Position in metres to which the left arm carries the socket."""
_APART, _JOINED = 0.18, 0.085
"""Distances in metres between the centres of socket and peg before and after insertion; the pin is touched at 0.1."""
_SPEED = 0.002
"""Decrease of that distance per step."""
_GAIN = 0.1
"""Fraction of the error of an object's pose by which a gripper's target moves in a step; objects swing above 0.15."""
_ALIGNED, _PARALLEL = 0.004, 0.06
"""Insertion starts below these errors of the peg relative to the socket: distance in metres, angle in rad."""
_RIGHT = rotated((0, 0, 1), np.pi) @ rotated((0, 1, 0), np.pi / 3)
_LEFT = rotated((0, 1, 0), np.pi / 3)
"""Orientations of the grippers: they point inwards, 60 degrees down, and close horizontally."""


class Stage(IntEnum):
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
        self._data, self._seen, self._planned = data, mujoco.MjData(model), mujoco.MjData(model)
        self._arms = [
            Arm(model, f"vx300s_{side}/gripper_link", [f"vx300s_{side}/{joint}" for joint in JOINTS], FINGERTIP)
            for side in ("left", "right")
        ]
        self._columns = [model.joint(name).qposadr[0] for name in ("blue_socket_joint", "red_peg_joint")]
        self.reset()

    def reset(self) -> None:
        """Start an episode in the current state of the simulation."""
        self._stage, self._stage_steps, self._gap = Stage.approach, 0, _APART
        self._planned.qpos[:] = self._data.qpos
        self._targets = [arm.pose(self._planned) for arm in self._arms]
        self._places = [pose.position for pose in self._objects()]

    def action(self) -> DoubleArray:
        """Return the joint targets [14] for the current state; call it once per step."""
        self._seen.qpos[:] = self._data.qpos
        objects = self._objects()
        self._advance(objects)
        goals = self._goals(objects)
        step = _STEP if self._stage < Stage.align else _CAREFUL
        self._targets = [a.towards(b, step, _TURN) for a, b in zip(self._targets, goals, strict=True)]
        opened = float(self._stage < Stage.close)
        joints = [arm.solve(self._planned, goal) for arm, goal in zip(self._arms, self._targets, strict=True)]
        return np.concatenate([joints[0], [opened], joints[1], [opened]])

    def _objects(self) -> list[Pose]:
        """Return the poses of socket and peg."""
        found = []
        for column in self._columns:
            matrix = np.zeros(9)
            mujoco.mju_quat2Mat(matrix, self._data.qpos[column + 3 : column + 7])
            found.append(Pose(self._data.qpos[column : column + 3].copy(), matrix.reshape(3, 3)))
        return found

    def _advance(self, objects: list[Pose]) -> None:
        """Select the stage."""
        self._stage_steps += 1
        socket, peg = objects
        if self._stage is Stage.approach:  # the objects fall onto the table first
            self._places = [socket.position, peg.position]
        wanted = Pose(socket.position + np.array([self._gap, 0.0, 0.0]), socket.rotation)
        if self._stage in (Stage.approach, Stage.lower, Stage.lift):
            near = 0.006 if self._stage is Stage.lower else 0.015
            poses = [arm.pose(self._seen) for arm in self._arms]
            done = all(a.is_near(b, near, 0.1) for a, b in zip(poses, self._goals(objects), strict=True))
        elif self._stage is Stage.close:
            done = self._stage_steps == _CLOSING_STEPS
        else:
            done = self._stage is Stage.align and peg.is_near(wanted, _ALIGNED, _PARALLEL)
        if self._stage is Stage.insert:
            self._gap = max(_JOINED, self._gap - _SPEED)
        if done:
            self._stage, self._stage_steps = Stage(self._stage + 1), 0

    def _goals(self, objects: list[Pose]) -> list[Pose]:
        """Return the goals of the left and the right gripper in the current stage."""
        if self._stage <= Stage.lift:
            height = {Stage.approach: _ABOVE, Stage.lift: _LIFTED}.get(self._stage, np.zeros(3))
            pairs = zip(self._places, _GRASPS, (_LEFT, _RIGHT), strict=True)
            return [Pose(place + offset + height, rotation) for place, offset, rotation in pairs]
        socket = objects[0]
        wanted = [
            Pose(_MEETING, np.eye(3)),
            Pose(socket.position + np.array([self._gap, 0.0, 0.0]), socket.rotation),
        ]
        return [self._corrected(*one) for one in zip(self._targets, objects, wanted, strict=True)]

    def _corrected(self, target: Pose, found: Pose, wanted: Pose) -> Pose:
        """Return the target of a gripper, moved by a part of the error of the object that the gripper holds."""
        way = _GAIN * (wanted.position - found.position)
        turn = rotation_between(found.rotation, wanted.rotation)
        return Pose(target.position + way, rotated(turn, _GAIN * float(np.linalg.norm(turn))) @ target.rotation)
