"""Kinematics of a MuJoCo arm: poses of its gripper, and joint angles for a pose by damped least squares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.types import DoubleArray

mujoco: Any = _mujoco

_DAMPING, _ITERATIONS, _TOLERANCE = 1e-3, 12, 1e-4


@dataclass(frozen=True, slots=True)
class Pose:
    """Position and orientation of a gripper in world coordinates."""

    position: DoubleArray
    """[3] position in meters."""
    rotation: DoubleArray
    """[3, 3] rotation matrix; its columns are the axes of the gripper."""

    def move_towards(self, goal: "Pose", distance: float, angle: float) -> "Pose":
        """Return the pose after a motion towards `goal` of at most `distance` meters and `angle` rad."""
        shift, rotation = goal.position - self.position, rotation_between(self.rotation, goal.rotation)
        distance_left, total_angle = np.linalg.norm(shift), float(np.linalg.norm(rotation))
        position = self.position + shift * min(1.0, distance / max(distance_left, 1e-9))
        return Pose(position, rotation_matrix(rotation, min(total_angle, angle)) @ self.rotation)

    def is_near(self, goal: "Pose", distance: float, angle: float) -> bool:
        """Return True if `goal` is at most `distance` meters and `angle` rad away."""
        rotation = rotation_between(self.rotation, goal.rotation)
        return bool(np.linalg.norm(goal.position - self.position) <= distance and np.linalg.norm(rotation) <= angle)


class Arm:
    """Arm with hinge joints whose gripper is a point at a fixed distance along the x axis of the last link."""

    def __init__(self, model: Any, link: str, joints: Sequence[str], offset: float) -> None:
        """Find link and joints by name in a MuJoCo model; the gripper is `offset` meters from the link."""
        self._model, self._link, self._offset = model, model.body(link).id, np.array([offset, 0.0, 0.0])
        joint_handles = [model.joint(name) for name in joints]
        self._columns = np.array([joint.qposadr[0] for joint in joint_handles])
        self._dofs = np.array([joint.dofadr[0] for joint in joint_handles])
        self._low, self._high = np.array([joint.range for joint in joint_handles]).T

    def compute_pose(self, data: Any) -> Pose:
        """Return the gripper's pose, computed from the joint angles in `data`."""
        mujoco.mj_kinematics(self._model, data)
        mujoco.mj_comPos(self._model, data)
        rotation = data.xmat[self._link].reshape(3, 3).copy()
        return Pose(data.xpos[self._link] + rotation @ self._offset, rotation)

    def solve_joint_angles(self, data: Any, goal: Pose) -> DoubleArray:
        """Return the joint angles [n] that bring the gripper to `goal`, within the joint limits.

        The search starts from the joint angles in `data`, and overwrites them. Damping keeps steps small near singular
        poses, so the result can be inexact there.
        """
        position_jacobian, rotation_jacobian = np.zeros((3, self._model.nv)), np.zeros((3, self._model.nv))
        angles = data.qpos[self._columns].copy()
        for _ in range(_ITERATIONS):
            pose = self.compute_pose(data)
            error = np.concatenate([goal.position - pose.position, rotation_between(pose.rotation, goal.rotation)])
            if np.abs(error).max() < _TOLERANCE:
                break
            mujoco.mj_jac(self._model, data, position_jacobian, rotation_jacobian, pose.position, self._link)
            jacobian = np.concatenate([position_jacobian, rotation_jacobian])[:, self._dofs]
            damped = jacobian @ jacobian.T + _DAMPING * np.eye(6)
            angles = np.clip(angles + jacobian.T @ np.linalg.solve(damped, error), self._low, self._high)
            data.qpos[self._columns] = angles
        return angles


def rotation_between(start: DoubleArray, end: DoubleArray) -> DoubleArray:
    """Return the rotation vector [3] in rad, in world coordinates, from one rotation matrix [3, 3] to another."""
    quaternion, vector = np.zeros(4), np.zeros(3)
    mujoco.mju_mat2Quat(quaternion, (end @ start.T).ravel())
    mujoco.mju_quat2Vel(vector, quaternion, 1.0)
    return vector


def rotation_matrix(axis: Sequence[float] | DoubleArray, angle: float) -> DoubleArray:
    """Return the matrix [3, 3] of a rotation by `angle` rad about an axis [3] of any length."""
    unit = np.asarray(axis, np.float64) / max(float(np.linalg.norm(axis)), 1e-9)
    quaternion, matrix = np.zeros(4), np.zeros(9)
    mujoco.mju_axisAngle2Quat(quaternion, unit, angle)
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)
