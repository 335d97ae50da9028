"""Loaded LIBERO task, whose complete simulation state can be saved and restored bit for bit."""

import contextlib
import copy
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from embodyrl.envs.global_state import numpy_seed, suppress_output
from embodyrl.envs.libero.fast import FastLoop
from embodyrl.envs.libero.lean import use_lean_models
from embodyrl.envs.libero.noise import SIZE as NOISE_SIZE
from embodyrl.envs.libero.noise import corrupt, resize
from embodyrl.envs.libero.plus import Variant, get_start_poses, move_camera
from embodyrl.envs.libero.rendering import MODEL_FIELDS, LeanRenderer, set_linear_colorspace
from embodyrl.envs.libero.scene import Scene
from embodyrl.envs.simulators import SimStep
from embodyrl.errors import EnvError
from embodyrl.types import ByteArray, DoubleArray, FloatArray

mujoco: Any = _mujoco
"""Module mujoco typed as Any, because it is compiled and has no type stubs."""


SETTLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # opens the gripper

JOINT_NOISE = 0.02
"""Standard deviation in rad of the noise on the robot's joints in the stored states (robosuite's default)."""

OBSERVED_SUBSTEP = 23
"""Substep (of 25) whose positions are visible in the benchmark's observations.

Robosuite reads cameras and poses after substep 24, but MuJoCo's derived poses are then those before that substep.
The gripper opening is read from the positions after substep 24."""

_PHYSICS = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_PLACEMENT_TRIES = 100
_OWN_FIELDS = ("_observed_qpos", "_observed_sites", "_gripper_qpos", "_corruption")
"""Attributes of `TaskSimulator` that belong to the state of the running episode."""
_CLOCK_FIELDS = ("timestep", "cur_time")
FRONT_CAMERA = "agentview"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimState:
    """Complete simulation state of an episode, with copies of all arrays."""

    physics: DoubleArray
    """MuJoCo integration state, including the warm start."""
    model: dict[str, np.ndarray]
    """Model fields that change at run time (`MODEL_FIELDS`)."""
    own: dict[str, Any]
    """Attributes of `TaskSimulator` that are listed in `_OWN_FIELDS`."""
    clock: dict[str, float]
    """Clock of robosuite's environment."""
    gripper_command: DoubleArray
    """Integrated open / close command of the gripper."""
    controller: dict[str, Any]
    """Numeric attributes of robosuite's controller."""


class TaskSimulator:
    """One LIBERO task in MuJoCo, stepped by the benchmark's own code.

    Robosuite's observables are removed: they only read the simulation, and would render every camera at every step. The
    benchmark's observation is reconstructed exactly from the positions at the sampled substep.
    """

    def __init__(
        self,
        bddl_file: Path,
        *,
        lean: bool = False,
        linear: bool = True,
        fast: bool = False,
        settle_steps: int = 10,
        settle_open: bool = True,
    ) -> None:
        """Load a task.

        Args:
            bddl_file: The benchmark's description of the task.
            lean: Use reduced visuals for software rendering (see `lean.py`); states stay bit-identical.
            linear: Ignore sRGB chunks of texture files (see `set_linear_colorspace`).
            fast: Use the faster physics loop (see `fast.py`); states are equal up to rounding.
            settle_steps: Number of steps after an initial state is set, because objects start in the air and fall.
            settle_open: True: open the gripper in these steps; False: send no gripper command.
        """
        self._settle_steps, self._settle_action = settle_steps, SETTLE_ACTION * settle_open
        from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]

        # The constructor samples poses from the global generator; a fixed seed gives the same model after reloading.
        lean_xmls: list[str] = []
        with suppress_output(), numpy_seed(0), use_lean_models(lean_xmls) if lean else contextlib.nullcontext():
            wrapper = OffScreenRenderEnv(
                bddl_file_name=str(bddl_file), use_camera_obs=False, hard_reset=False, ignore_done=True
            )
        self._env: Any = wrapper.env
        self.instruction = str(wrapper.language_instruction)
        """Instruction in the task's description."""
        self._lean = LeanRenderer(self._env, lean_xmls[-1]) if lean else None
        if linear:
            set_linear_colorspace(self._env.sim._render_context_offscreen)
        self._fast = FastLoop(self._env) if fast else None
        self.scene = Scene(self._env)
        self._env._observables = {}
        self._env._update_observables = _do_nothing
        self._robot = self._env.robots[0]
        self._model = self._env.sim.model._model
        self._data = self._env.sim.data._data
        self._hand = self._model.body(self._robot.robot_model.eef_name).id
        self._fingers = self._get_qpos_indices(self._robot.gripper.joints)
        self._initial_sites = self._model.site_rgba.copy()
        self._fixtures = [self._model.body(fixture.root_body).id for fixture in self._env.fixtures_dict.values()]
        self._observed_qpos, self._observed_sites = self._data.qpos.copy(), self._initial_sites
        self._gripper_qpos = self._data.qpos[self._fingers]
        front = self._model.camera(FRONT_CAMERA).id
        self._front = self._model.cam_pos[front], self._model.cam_quat[front]
        self._default_camera = tuple(part.copy() for part in self._front)
        self._default_joints = np.array(self._robot.init_qpos)
        self._corruption: Variant | None = None
        """LIBERO-Plus variant whose corruption is applied to images of the front camera; None: no corruption."""

    def reset(self, init_state: DoubleArray, seed: int, variant: Variant | None = None) -> bool:
        """Start an episode from a stored state [1 + nq + nv]; return True if the goal is already reached.

        `seed` determines the fixture poses, which are not part of the state. `variant` is a LIBERO-Plus perturbation.
        As in the benchmark, the stored state moves the arm back to its default pose, and the controller, whose goal is
        still the variant's pose, moves the arm again.

        The result is bit-identical to a newly built task with the same seed, but takes a fraction of the time. The
        gripper's last command and the visibility of sites, which a soft reset of robosuite keeps, are reset here.

        Raises:
            EnvError: the objects could not be placed, or the state does not fit the model.
        """
        expected = (1 + self._model.nq + self._model.nv,)
        if init_state.shape != expected:
            raise EnvError(
                f"LIBERO task '{self.instruction}': the initial state has shape {init_state.shape}, but the model has "
                f"states of shape {expected}. The package's states and scenes have different versions. Reinstall "
                "LIBERO."
            )
        self._model.site_rgba[:] = self._initial_sites
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)
        self._robot.init_qpos = (
            get_start_poses()[variant.start_pose].copy() if variant and variant.start_pose else self._default_joints
        )
        with suppress_output(), numpy_seed(seed):
            self._place_objects()
        front = move_camera(variant.camera_move, *self._default_camera) if variant else self._default_camera
        for current, target in zip(self._front, front, strict=True):
            current[:] = target
        self._corruption = variant if variant and variant.noise else None
        self._env.sim.set_state_from_flattened(init_state)
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()
        return [self.step(self._settle_action).success for _ in range(self._settle_steps)][-1]

    def sample_state(self, seed: int) -> DoubleArray:
        """Sample an initial state [1 + nq + nv]: object placements, and noise on the robot's joints."""
        self._robot.init_qpos = self._default_joints
        with suppress_output(), numpy_seed(seed):
            self._place_objects()
            joints = 1 + self._get_qpos_indices(self._robot.robot_model.joints)
            state = self._env.sim.get_state().flatten()
            state[joints] += np.random.normal(0.0, JOINT_NOISE, len(joints))
        return state

    def _get_qpos_indices(self, joints: Sequence[str]) -> np.ndarray:
        """Return the indices of hinge and slide joints in qpos."""
        return np.array([self._model.joint(name).qposadr[0] for name in joints])

    def step(self, action: npt.ArrayLike) -> SimStep:
        """Execute one action [7] in -1..1; success is the benchmark's goal predicate after the step."""
        self._observed_sites = self._model.site_rgba.copy()
        command = np.asarray(action, np.float64)
        self._env.timestep += 1
        # The first step after a reset uses the controller's measurements from before the initial state was set, as in
        # the benchmark.
        if self._fast is None or not self._robot.controller.new_update:
            self._run_original_loop(command)
        else:
            self._observed_qpos, after = self._fast.run(command, OBSERVED_SUBSTEP)
            self._gripper_qpos = after[self._fingers]
        self._env.cur_time += self._env.control_timestep
        reward, _, _ = self._env._post_action(command)
        # The reward is the goal predicate, but before fixtures change their state (a stove turns on).
        done = bool(self._env._check_success()) if self._env.tracking_object_states_change else reward > 0
        return SimStep(reward=float(reward), terminated=done, success=done)

    def get_goal_fraction(self) -> float:
        """Return the fraction of the task's goal predicates that are true."""
        # Contacts may still be those of another environment on the same model.
        mujoco.mj_fwdPosition(self._model, self._data)
        reached = [bool(self._env._eval_predicate(state)) for state in self._env.parsed_problem["goal_state"]]
        return sum(reached) / len(reached)

    def _run_original_loop(self, command: DoubleArray) -> None:
        """Run the benchmark's substeps and controller with only one dynamics evaluation per substep.

        The results are bit-identical. Robosuite evaluates the dynamics twice before its controller, which needs only
        positions and velocities (`mj_step1`), and MuJoCo evaluates them again with the controls (here only `mj_step2`).
        """
        env, sim = self._env, self._env.sim
        sim.forward = _do_nothing
        try:
            for substep in range(int(env.control_timestep / env.model_timestep)):
                mujoco.mj_step1(self._model, self._data)
                env._pre_action(command, substep == 0)
                mujoco.mj_step2(self._model, self._data)
                self._record_observation(substep + 1)
        finally:
            del sim.forward

    def observe(self, cameras: tuple[str, ...], images: ByteArray, state: FloatArray) -> None:
        """Write camera images [C, H, W, 3] (OpenGL row order) and proprioception [8] into the arrays.

        Proprioception: hand position (m), hand orientation as axis-angle (rad), and the two finger positions (m).
        """
        from robosuite.utils.transform_utils import quat2axisangle  # pyright: ignore[reportMissingImports]

        height, width = images.shape[1:3]
        with self._observed_poses():
            for view, camera in zip(images, cameras, strict=True):
                view[...] = self._render_camera(camera, height, width)
            state[0:3] = self._data.site_xpos[self._robot.eef_site_id]
            state[3:6] = quat2axisangle(np.roll(self._data.xquat[self._hand], -1))  # from w x y z to x y z w
            state[6:8] = self._gripper_qpos

    def render_frame(self, camera: str, height: int, width: int) -> ByteArray:
        """Return an upright frame [H, W, 3] for videos, not mirrored."""
        with self._observed_poses():
            return np.ascontiguousarray(self._render_camera(camera, height, width)[::-1])

    def save(self) -> SimState:
        """Return a copy of the state of the running episode."""
        physics = np.empty(mujoco.mj_stateSize(self._model, _PHYSICS))
        mujoco.mj_getState(self._model, self._data, physics, _PHYSICS)
        return SimState(
            physics=physics,
            model={name: getattr(self._model, name).copy() for name in MODEL_FIELDS},
            own={name: copy.copy(getattr(self, name)) for name in _OWN_FIELDS},
            clock={name: getattr(self._env, name) for name in _CLOCK_FIELDS},
            gripper_command=np.array(self._robot.gripper.current_action),
            controller=_copy_numeric_attributes(self._robot.controller),
        )

    def load(self, state: SimState) -> None:
        """Restore a saved episode of this task, which may come from another instance of the model."""
        for name, value in state.model.items():
            getattr(self._model, name)[:] = value
        mujoco.mj_setState(self._model, self._data, state.physics, _PHYSICS)
        for name, value in state.own.items():
            setattr(self, name, copy.copy(value))
        vars(self._env).update(state.clock)
        self._robot.gripper.current_action = state.gripper_command.copy()
        vars(self._robot.controller).update({name: copy.copy(value) for name, value in state.controller.items()})

    def close(self) -> None:
        """Free the model and its OpenGL objects."""
        if self._lean is not None:
            self._lean.close()
        # The context deletes objects by number in the current context, so make it current.
        self._env.sim._render_context_offscreen.gl_ctx.make_current()
        self._env.close()
        # Robosuite's objects form reference cycles; gigabytes would wait for the next garbage collection.
        vars(self).clear()
        gc.collect()

    def _place_objects(self) -> None:
        from robosuite.utils.errors import RandomizationError  # pyright: ignore[reportMissingImports]

        for _ in range(_PLACEMENT_TRIES):
            # Restore the positions in a new model. The sampler adds a fixture's position to that of its sites, so that
            # after another episode bowls would float in the air.
            self._model.body_pos[self._fixtures] = 0.0
            self._model.body_quat[self._fixtures] = 1.0, 0.0, 0.0, 0.0
            with contextlib.suppress(RandomizationError):
                self._env.reset()
                return
        raise EnvError(
            f"LIBERO task '{self.instruction}': found no collision-free placement of its objects in "
            f"{_PLACEMENT_TRIES} attempts. Use another seed."
        )

    def _record_observation(self, substep: int) -> None:
        """Store the values that robosuite's observables would read after physics substep `substep` (counted from 1)."""
        if substep == OBSERVED_SUBSTEP:
            self._observed_qpos = self._data.qpos.copy()
        elif substep == OBSERVED_SUBSTEP + 1:
            self._gripper_qpos = self._data.qpos[self._fingers]

    @contextlib.contextmanager
    def _observed_poses(self) -> Iterator[None]:
        """Set the poses of the observed substep; after the `with` block, restore the current state."""
        qpos, sites = self._data.qpos.copy(), self._model.site_rgba.copy()
        self._data.qpos[:] = self._observed_qpos
        self._model.site_rgba[:] = self._observed_sites
        try:
            # Poses of bodies, centers, cameras and lights: inputs of rendering, without dynamics.
            mujoco.mj_kinematics(self._model, self._data)
            mujoco.mj_comPos(self._model, self._data)
            mujoco.mj_camlight(self._model, self._data)
            if self._lean is not None:
                self._lean.update_poses()
            yield
        finally:
            self._data.qpos[:] = qpos
            self._model.site_rgba[:] = sites

    def _render_camera(self, camera: str, height: int, width: int) -> ByteArray:
        if self._corruption is None or camera != FRONT_CAMERA:
            return self._render_uncorrupted(camera, height, width)
        # The corruptions depend on pixels: apply them at the benchmark's size, then resize.
        rng = np.random.RandomState([*self._corruption.noise_seed, self._env.timestep])
        corrupted = corrupt(self._render_uncorrupted(camera, NOISE_SIZE, NOISE_SIZE), self._corruption.noise, rng)
        return corrupted if corrupted.shape == (height, width, 3) else resize(corrupted, height, width)

    def _render_uncorrupted(self, camera: str, height: int, width: int) -> ByteArray:
        if self._lean is not None:
            return self._lean.render(camera, height, width)
        # Several models share this process, and robosuite renders into the current context.
        self._env.sim._render_context_offscreen.gl_ctx.make_current()
        return self._env.sim.render(camera_name=camera, width=width, height=height)


def _do_nothing(force: bool = False) -> None:
    """Replace robosuite methods that are not needed; do nothing."""


def _copy_numeric_attributes(owner: object) -> dict[str, Any]:
    """Copy the numeric attributes of a controller: its goal, reference pose and cached kinematics."""
    types = (np.ndarray, np.generic, bool, int, float, type(None))
    return {name: copy.copy(value) for name, value in vars(owner).items() if isinstance(value, types)}
