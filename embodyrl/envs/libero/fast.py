"""`env.fast_physics`: one control step of LIBERO without the work that robosuite repeats.

Robosuite evaluates MuJoCo's forward dynamics three times per physics substep (its own `forward`, the controller's,
and the one inside `mj_step`) where one is enough: `mj_step1`, controller, `mj_step2`. The controller's law is the same,
written with fewer matrix products; results agree with the published benchmark up to rounding, not to the last bit.
"""

from collections.abc import Callable
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
from scipy.linalg.lapack import dposv  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from embodyrl.errors import EnvError
from embodyrl.types import DoubleArray

mujoco: Any = _mujoco


_NULLSPACE_KP = 10.0
"""Robosuite's stiffness towards the initial joint positions, 1/s^2; damping is critical."""


class FastLoop:
    """The physics substeps of one action for one Panda with operational space control (OSC_POSE)."""

    def __init__(self, env: Any) -> None:
        self._model = env.sim.model._model
        self._data = env.sim.data._data
        robot = env.robots[0]
        self._gripper = robot.gripper
        self._robot = robot
        self._substeps = int(env.control_timestep / env.model_timestep)

        c = robot.controller  # only the benchmark's own controller is restated here
        assert c.name == "OSC_POSE" and c.impedance_mode == "fixed" and c.uncoupling, c.name
        assert c.interpolator_pos is None and c.interpolator_ori is None

        data, self._arm = self._data, _as_slice(c.qvel_index)
        qpos = _as_slice(c.qpos_index)
        site = self._model.site(c.eef_name).id
        self._position, self._rotation = data.site_xpos[site], data.site_xmat[site].reshape(3, 3)
        self._joints, self._speeds = data.qpos[qpos], data.qvel[self._arm]
        self._bias = data.qfrc_bias[self._arm]
        self._site, self._inertia = site, data.qM
        self._jacobian = np.zeros((6, self._model.nv))
        self._jacobian_halves = (self._jacobian[:3], self._jacobian[3:])
        self._mass = np.zeros((self._model.nv, self._model.nv))

        self._arm_ctrl = data.ctrl[_as_slice(robot._ref_joint_actuator_indexes)]
        self._low, self._high = (limit.copy() for limit in robot.torque_limits)
        fingers = [self._model.actuator(name).id for name in robot.gripper.actuators]
        self._finger_ctrl = data.ctrl[_as_slice(fingers)]
        low, high = self._model.actuator_ctrlrange[fingers].T
        self._finger_middle, self._finger_span = 0.5 * (high + low), 0.5 * (high - low)

    def run(self, action: DoubleArray, after_substep: Callable[[], None]) -> None:
        """Execute one action [7] for a control period; `after_substep` is called after each physics substep."""
        model, data = self._model, self._data
        controller = self._robot.controller  # robosuite makes a new one at every reset
        arm, grip = action[:6], action[6:]
        for substep in range(self._substeps):
            mujoco.mj_step1(model, data)
            if substep == 0:
                self._set_goal(controller, arm)
            self._arm_ctrl[:] = np.clip(self._torques(controller), self._low, self._high)
            self._finger_ctrl[:] = self._finger_middle + self._finger_span * self._gripper.format_action(grip)
            mujoco.mj_step2(model, data)
            after_substep()

    def _set_goal(self, controller: Any, arm: DoubleArray) -> None:
        controller.ee_pos = self._position.copy()
        controller.ee_ori_mat = self._rotation.copy()
        controller.new_update = False  # the poses above are current; nothing else is read for the goal
        controller.set_goal(arm)
        controller.new_update = True

    def _torques(self, c: Any) -> DoubleArray:
        """Operational space control (Khatib 1987, as robosuite 1.4): joint torques [7], N m.

        With A = J M^-1 J^T, position and orientation decoupled, and x the nullspace acceleration towards the initial
        joints: tau = J^T (wrench - A^-1 J x) + M x + bias.
        """
        mujoco.mj_jacSite(self._model, self._data, *self._jacobian_halves, self._site)
        mujoco.mj_fullM(self._model, self._mass, self._inertia)
        jacobian, mass = self._jacobian[:, self._arm], self._mass[self._arm, self._arm]
        speeds = self._speeds
        velocity = jacobian @ speeds
        error = np.concatenate([c.goal_pos - self._position, _rotation_error(c.goal_ori, self._rotation)])
        desired = error * c.kp - velocity * c.kd
        inverse_inertia = jacobian @ _solve(mass, jacobian.T)
        pull = _NULLSPACE_KP * (c.initial_joint - self._joints) - 2.0 * np.sqrt(_NULLSPACE_KP) * speeds
        wrench = -_solve(inverse_inertia, jacobian @ pull)
        wrench[:3] += _solve(inverse_inertia[:3, :3], desired[:3])
        wrench[3:] += _solve(inverse_inertia[3:, 3:], desired[3:])
        return jacobian.T @ wrench + mass @ pull + self._bias


def _solve(matrix: DoubleArray, right: DoubleArray) -> DoubleArray:
    """Solve a small symmetric positive definite system; numpy's general solver costs several times as much.

    Raises:
        EnvError: the matrix is singular or not finite.
    """
    _, solution, info = dposv(matrix, right)
    if info:
        raise EnvError(
            "LIBERO: the arm's operational space inertia is singular or not finite; the physics diverged. "
            "Check the actions, or use env.fast_physics=false, which tolerates singular poses."
        )
    return solution


def _rotation_error(goal: DoubleArray, current: DoubleArray) -> DoubleArray:
    """Half the sum of cross products of matching axes [3]: the vee of the antisymmetric part of goal current^T."""
    difference = goal @ current.T
    return 0.5 * np.array(
        [
            difference[2, 1] - difference[1, 2],
            difference[0, 2] - difference[2, 0],
            difference[1, 0] - difference[0, 1],
        ]
    )


def _as_slice(indices: Any) -> slice:
    """Indices as a slice, so that indexing gives a view."""
    numbers = [int(index) for index in indices]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), numbers
    return slice(numbers[0], numbers[-1] + 1)
