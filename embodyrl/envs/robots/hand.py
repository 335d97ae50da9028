"""Scripted expert for HandReach of the Shadow hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.types import BoolArray, DoubleArray, FloatArray

mujoco: Any = _mujoco

_GAIN, _SLOWDOWN_RADIUS, _MIN_FRACTION = 0.5, 0.02, 0.15
"""Fraction of the computed change of the joint targets that is applied per step. At position errors below 2 cm, the
fraction decreases in proportion to the error, to at least 15 % of `_GAIN`."""
_DAMPING = 1e-4
"""Damping of the least-squares solution, in m^2/rad^2."""
_DELAY_S = 0.04
"""Time in seconds by which the tips' positions are extrapolated, because the joints lag behind their targets."""
_COUPLING = 0.00805 / 0.00705
"""Rotation of a finger's last joint per rotation of its middle joint; a tendon couples both joints."""


class HandReachExpert(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds `expert_action` to HandReach: moves joint targets by damped least squares.

    The expert reads the simulator's state, not observations.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        base: Any = env.unwrapped
        self._model, self._data = base.model, base.data
        names = [self._model.actuator(i).name.replace(":A_", ":") for i in range(self._model.nu)]
        self._joint_coupling = np.zeros((self._model.nv, self._model.nu))
        """[V, 20] change of each joint per change of each joint target."""
        for column, name in enumerate(names):
            self._joint_coupling[self._model.joint(name).dofadr[0], column] = 1.0
            if name.endswith(("FFJ1", "MFJ1", "RFJ1", "LFJ1")):
                self._joint_coupling[self._model.joint(f"{name[:-1]}0").dofadr[0], column] = _COUPLING
        self._tips = [self._model.site(f"robot0:S_{finger}tip").id for finger in ("ff", "mf", "rf", "lf", "th")]
        self._low, self._high = self._model.actuator_ctrlrange.T

    def expert_action(self) -> FloatArray:
        """Return the joint targets [20], scaled to -1..1."""
        jacobian = np.zeros((3 * len(self._tips), self._model.nv))
        for i, tip in enumerate(self._tips):
            mujoco.mj_jacSite(self._model, self._data, jacobian[3 * i : 3 * i + 3], None, tip)
        goal: Any = self.get_wrapper_attr("goal")
        error = goal - self._data.site_xpos[self._tips].ravel()
        change = self._solve(jacobian @ self._joint_coupling, error - _DELAY_S * (jacobian @ self._data.qvel))
        step = _GAIN * np.clip(np.linalg.norm(error) / _SLOWDOWN_RADIUS, _MIN_FRACTION, 1.0)
        targets = np.clip(self._data.ctrl + step * change, self._low, self._high)
        return (2 * (targets - self._low) / (self._high - self._low) - 1).astype(np.float32)

    def _solve(self, jacobian: DoubleArray, error: DoubleArray) -> DoubleArray:
        """Return the change [20] of joint targets for an error [15]; targets at their limits may be fixed."""
        free: BoolArray = np.ones(self._model.nu, np.bool_)
        while True:
            free_jacobian = jacobian * free
            change = free_jacobian.T @ np.linalg.solve(
                free_jacobian @ free_jacobian.T + _DAMPING * np.eye(len(error)), error
            )
            at_upper_limit, at_lower_limit = self._data.ctrl >= self._high - 1e-6, self._data.ctrl <= self._low + 1e-6
            blocked = free & ((at_upper_limit & (change > 0)) | (at_lower_limit & (change < 0)))
            if not blocked.any():
                return change
            free = free & ~blocked
