"""`env.fast_physics`: one control step of LIBERO without robosuite's repeated computations.

Robosuite evaluates MuJoCo's forward dynamics three times per physics substep (in its own `forward`, in the controller,
and in `mj_step`); one evaluation is enough: `mj_step1`, controller, `mj_step2`. The control law is the same, with fewer
matrix products. Numba (a dependency of robosuite) compiles it together with MuJoCo's calls, because in Python it takes
as long as the physics. Results agree with the published benchmark up to rounding, not bit by bit.
"""

from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as _llvm  # pyright: ignore[reportMissingImports]
import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numba as _numba  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.errors import EnvError
from embodyrl.types import DoubleArray, IntArray

llvm: Any = _llvm
mujoco: Any = _mujoco
numba: Any = _numba


_NULLSPACE_KP = 10.0
"""Nullspace stiffness of robosuite's controller towards the initial joint positions, 1/s^2; damping is critical."""

llvm.load_library_permanently(str(next(Path(mujoco.__file__).parent.glob("libmujoco*"))))
_pointer_type, _void_type = numba.types.uintp, numba.types.void
_step1 = numba.types.ExternalFunction("mj_step1", _void_type(_pointer_type, _pointer_type))
_step2 = numba.types.ExternalFunction("mj_step2", _void_type(_pointer_type, _pointer_type))


class _Arm(NamedTuple):
    """Views of the simulation's float64 arrays for one arm, and the limits of its torques and gripper."""

    positions: DoubleArray
    """Joint positions [nq] of the whole model."""
    position: DoubleArray
    """Position [3] of the hand, m."""
    rotation: DoubleArray
    """Rotation matrix [3, 3] of the hand."""
    joints: DoubleArray
    """Joint positions [7], rad."""
    speeds: DoubleArray
    """Joint velocities [7], rad/s."""
    bias: DoubleArray
    """Gravity and Coriolis torques [7], N m."""
    axes: DoubleArray
    """Rotation and translation axes [7, 6] of the joints, about the center of mass of the robot."""
    center: DoubleArray
    """Center of mass [3] of the robot, m."""
    inertia: DoubleArray
    """Mass matrix of the model in MuJoCo's sparse form."""
    entries: IntArray
    """[7, 7] index of each entry of the arm's mass matrix in `inertia`; only the lower triangle is set."""
    torques: DoubleArray
    """Torque commands [7] of the motors, N m."""
    low: DoubleArray
    """Lower torque limits [7], N m."""
    high: DoubleArray
    """Upper torque limits [7], N m."""
    fingers: DoubleArray
    """Position commands [2] of the fingers, m."""
    finger_middle: DoubleArray
    """Middle [2] between the closed and the open position of the fingers, m."""
    finger_span: DoubleArray
    """Half the distance [2] from the closed to the open position of the fingers, m."""


class FastLoop:
    """Fast physics loop for a Panda arm with operational space control (OSC_POSE)."""

    def __init__(self, env: Any) -> None:
        self._model = env.sim.model._model
        self._data = env.sim.data._data
        # Disables force sensors at the wrist, whose observations are unused.
        self._model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
        robot = env.robots[0]
        self._gripper = robot.gripper
        self._robot = robot
        self._substeps = int(env.control_timestep / env.model_timestep)

        c = robot.controller  # only the benchmark's own controller and gripper are implemented here
        assert c.name == "OSC_POSE" and c.impedance_mode == "fixed" and c.uncoupling, c.name
        assert c.interpolator_pos is None and c.interpolator_ori is None
        assert type(robot.gripper).__name__ == "PandaGripper", type(robot.gripper)

        data, arm = self._data, _as_slice(c.qvel_index)
        site = self._model.site(c.eef_name).id
        low, high = (limit.copy() for limit in robot.torque_limits)
        fingers = [self._model.actuator(name).id for name in robot.gripper.actuators]
        closed, opened = self._model.actuator_ctrlrange[fingers].T
        entries = np.zeros((7, 7), np.int64)
        assert np.ptp(self._model.dof_parentid[arm] - np.arange(7)) == 0, "the joints of an arm are one chain"
        for joint in range(7):  # a row of the sparse matrix goes from a joint towards the base
            below = self._model.dof_Madr[arm.start + joint] + np.arange(joint + 1)
            entries[joint, : joint + 1] = below[::-1]
        root = self._model.body_rootid[self._model.site_bodyid[site]]
        self._arm = _Arm(
            positions=data.qpos,
            position=data.site_xpos[site],
            rotation=data.site_xmat[site].reshape(3, 3),
            joints=data.qpos[_as_slice(c.qpos_index)],
            speeds=data.qvel[arm],
            bias=data.qfrc_bias[arm],
            axes=data.cdof[arm],
            center=data.subtree_com[root],
            inertia=data.qM,
            entries=entries,
            torques=data.ctrl[_as_slice([self._model.actuator(name).id for name in robot.robot_model.actuators])],
            low=low,
            high=high,
            fingers=data.ctrl[_as_slice(fingers)],
            finger_middle=0.5 * (opened + closed),
            finger_span=0.5 * (opened - closed),
        )

    def run(self, action: DoubleArray, first: int) -> DoubleArray:
        """Execute one action [7]; return the joint positions [2, nq] after substep `first` and after the next substep.

        Raises:
            EnvError: the arm's inertia is singular or not finite.
        """
        c = self._robot.controller  # robosuite creates a new controller at every reset
        command = self._gripper.current_action + np.zeros(2)  # after a reset, current_action is a scalar
        joint_positions = np.empty((2, self._model.nq))
        mujoco.mj_step1(self._model, self._data)
        self._set_goal(c, action[:6])
        if not _advance(
            self._model._address, self._data._address, self._substeps, self._arm, c.goal_pos, c.goal_ori, c.kp, c.kd,
            c.initial_joint, command, self._gripper.speed * np.sign(action[6]), first, joint_positions,
        ):  # fmt: skip
            raise EnvError(
                "LIBERO: the arm's operational space inertia is singular or not finite; the physics diverged. "
                "Check the actions, or set env.fast_physics=false, which tolerates singular poses."
            )
        self._gripper.current_action = command
        return joint_positions

    def _set_goal(self, controller: Any, arm: DoubleArray) -> None:
        controller.ee_pos = self._arm.position.copy()
        controller.ee_ori_mat = self._arm.rotation.copy()
        controller.new_update = False  # the poses above are current; the goal needs no other data
        controller.set_goal(arm)
        controller.new_update = True


@numba.njit(cache=True)
def _advance(
    model: int, data: int, count: int, arm: _Arm, goal: DoubleArray, goal_rotation: DoubleArray,
    kp: DoubleArray, kd: DoubleArray, rest: DoubleArray, command: DoubleArray, finger_speed: float,
    first: int, joint_positions: DoubleArray,
) -> bool:  # fmt: skip
    """Run `count` substeps, the first one without `mj_step1`; return False if the inertia matrix is singular.

    `joint_positions` [2, nq] receives the positions after substep `first` (counted from 1) and after the next substep.
    """
    jacobian, mass = np.empty((6, 7)), np.empty((7, 7))
    for substep in range(count):
        if substep:
            _step1(model, data)
        _compute_jacobian_and_mass(arm, jacobian, mass)
        if not _set_torques(arm, jacobian, mass, goal, goal_rotation, kp, kd, rest):
            return False
        for finger in range(2):
            moved = command[finger] + (2.0 * finger - 1.0) * finger_speed
            command[finger] = min(max(moved, -1.0), 1.0)
            arm.fingers[finger] = arm.finger_middle[finger] + arm.finger_span[finger] * command[finger]
        _step2(model, data)
        if 0 <= substep + 1 - first < 2:
            joint_positions[substep + 1 - first] = arm.positions
    return True


@numba.njit(cache=True)
def _compute_jacobian_and_mass(arm: _Arm, jacobian: DoubleArray, mass: DoubleArray) -> None:
    """Compute the hand's Jacobian [6, 7] and the arm's mass matrix [7, 7], with the formulas of MuJoCo."""
    for joint in range(7):
        axis = arm.axes[joint]
        for i in range(3):
            j, k = (i + 1) % 3, (i + 2) % 3
            lever_j, lever_k = arm.position[j] - arm.center[j], arm.position[k] - arm.center[k]
            jacobian[i, joint] = axis[3 + i] + (axis[j] * lever_k - axis[k] * lever_j)
            jacobian[3 + i, joint] = axis[i]
        for other in range(joint + 1):
            mass[joint, other] = mass[other, joint] = arm.inertia[arm.entries[joint, other]]


@numba.njit(cache=True)
def _set_torques(
    arm: _Arm, jacobian: DoubleArray, mass: DoubleArray, goal: DoubleArray, goal_rotation: DoubleArray,
    kp: DoubleArray, kd: DoubleArray, rest: DoubleArray,
) -> bool:  # fmt: skip
    """Compute joint torques [7] (N m) by operational space control; return False if the inertia is singular.

    The control law is that of robosuite 1.4 (Khatib 1987); x is the nullspace acceleration towards the initial joints.
    Position and orientation are decoupled: tau = J^T (wrench - A^-1 J x) + M x + bias, with A = J M^-1 J^T.
    """
    desired, wrench, nullspace_acceleration = np.empty(6), np.zeros(6), np.empty(7)
    for joint in range(7):
        nullspace_acceleration[joint] = _NULLSPACE_KP * (rest[joint] - arm.joints[joint])
        nullspace_acceleration[joint] -= 2.0 * np.sqrt(_NULLSPACE_KP) * arm.speeds[joint]
    # Half the sum of cross products of matching axes: the vee of the antisymmetric part of goal current^T.
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        desired[i] = goal[i] - arm.position[i]
        desired[3 + i] = 0.0
        for axis in range(3):
            desired[3 + i] += 0.5 * goal_rotation[k, axis] * arm.rotation[j, axis]
            desired[3 + i] -= 0.5 * goal_rotation[j, axis] * arm.rotation[k, axis]
    for i in range(6):
        velocity = 0.0
        for joint in range(7):
            velocity += jacobian[i, joint] * arm.speeds[joint]
            wrench[i] -= jacobian[i, joint] * nullspace_acceleration[joint]
        desired[i] = desired[i] * kp[i] - velocity * kd[i]
    root, columns, inverse_inertia = mass.copy(), jacobian.T.copy(), np.zeros((6, 6))
    if not _factorize(root):
        return False
    for i in range(6):
        _solve_lower(root, columns[:, i])
        for j in range(i + 1):
            for joint in range(7):
                inverse_inertia[i, j] += columns[joint, i] * columns[joint, j]
    rotation_block = inverse_inertia[3:, 3:].copy()
    if not (_factorize(inverse_inertia) and _factorize(rotation_block)):
        return False
    _solve(inverse_inertia, wrench)
    # The Cholesky factor of the first three rows is the first three rows of the factor.
    _solve(inverse_inertia[:3, :3], desired[:3])
    _solve(rotation_block, desired[3:])
    for joint in range(7):
        torque = arm.bias[joint]
        for i in range(6):
            torque += jacobian[i, joint] * (wrench[i] + desired[i])
        for other in range(7):
            torque += mass[joint, other] * nullspace_acceleration[other]
        arm.torques[joint] = min(max(torque, arm.low[joint]), arm.high[joint])
    return True


@numba.njit(cache=True)
def _factorize(matrix: DoubleArray) -> bool:
    """Replace the lower triangle of a small symmetric matrix with its Cholesky factor; return False if none exists."""
    for i in range(len(matrix)):
        for j in range(i + 1):
            rest = matrix[i, j]
            for k in range(j):
                rest -= matrix[i, k] * matrix[j, k]
            if i > j:
                matrix[i, j] = rest / matrix[j, j]
            elif rest > 0.0:  # neither negative nor NaN
                matrix[i, i] = np.sqrt(rest)
            else:
                return False
    return True


@numba.njit(cache=True)
def _solve_lower(root: DoubleArray, rhs: DoubleArray) -> None:
    """Solve L x = rhs in place."""
    for i in range(len(root)):
        for k in range(i):
            rhs[i] -= root[i, k] * rhs[k]
        rhs[i] /= root[i, i]


@numba.njit(cache=True)
def _solve(root: DoubleArray, rhs: DoubleArray) -> None:
    """Solve L L^T x = rhs in place."""
    _solve_lower(root, rhs)
    for i in range(len(root) - 1, -1, -1):
        for k in range(i + 1, len(root)):
            rhs[i] -= root[k, i] * rhs[k]
        rhs[i] /= root[i, i]


def _as_slice(indices: Any) -> slice:
    """Convert consecutive indices to a slice, so that indexing gives a view."""
    numbers = [int(index) for index in indices]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), numbers
    return slice(numbers[0], numbers[-1] + 1)
