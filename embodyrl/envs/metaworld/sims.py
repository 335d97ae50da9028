"""Simulators for MetaWorld tasks, one per environment and task, and the package's scripted experts."""

import copy
import warnings
from typing import Any

import metaworld.policies as experts  # pyright: ignore[reportMissingImports]
import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # pyright: ignore[reportMissingImports]

from embodyrl.envs.metaworld.settings import PROPRIOCEPTION, STATE, MetaWorldSettings
from embodyrl.envs.settings import RenderProfile
from embodyrl.envs.simulators import SequentialSimulators, SimStep
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut

mujoco: Any = _mujoco

# Experts log this warning once per task, because their actions are clipped on purpose.
warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")

_GOAL = slice(36, 39)
_CORNER2 = (0.75, 0.075, 0.7)
"""Position of the camera `corner2` in published data sets and evaluations."""


class MetaWorldSims(SequentialSimulators):
    """Simulators for MetaWorld tasks; the goal is part of the observation, except in ML benchmarks.

    The state number of a reset id is the seed of the goal and the objects. Observations, rewards and successes are
    those of the package with `seeded_rand_vec`. The package never terminates episodes; here a success does.
    """

    def __init__(
        self, spec: EnvSpec, cfg: MetaWorldSettings, *, hides_goal: bool, renders: bool, max_idle: int
    ) -> None:
        super().__init__(spec)
        self._cfg, self._hides_goal, self._renders, self._max_idle = cfg, hides_goal, renders, max_idle
        self._idle_envs: list[tuple[int, Any]] = []
        """Tasks and simulators that no environment uses, oldest first."""
        self._envs: dict[int, tuple[int, Any]] = {}
        self._observations: dict[int, np.ndarray] = {}

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        """Sample the goal and the objects with the reset id as seed; there is no other randomness."""
        task, state = self.spec.task_of(reset_id)
        if env_index in self._envs and self._envs[env_index][0] != task:
            self._idle_envs.append(self._envs.pop(env_index))
        if env_index not in self._envs:
            index = next((i for i, (idle_task, _) in enumerate(self._idle_envs) if idle_task == task), None)
            self._envs[env_index] = (task, self._build(task)) if index is None else self._idle_envs.pop(index)
        while len(self._idle_envs) > self._max_idle:
            self._idle_envs.pop(0)[1].close()
        env = self._envs[env_index][1]
        env.seed(state)
        self._observations[env_index] = env.reset()[0]
        self.record_solved_start(env_index, solved=_is_goal_reached(env))

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        """Execute one action [4], clipped to -1..1 in all dimensions; the package clips only the first three."""
        self._observations[env_index], reward, _, _, info = self._envs[env_index][1].step(np.clip(action, -1.0, 1.0))
        success = bool(info["success"])
        return SimStep(reward=float(reward), terminated=success, success=success)

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        """Write images, hand position and gripper (with `pixels`), or the 39-dimensional state and one-hot task id."""
        observation = self._observations[env_index]
        if self._cfg.pixels:
            out.state[:] = observation[:PROPRIOCEPTION]
            for index, camera in enumerate(self.spec.cameras.names):
                out.images[index] = self._render_camera(env_index, camera)
            return
        out.state[:] = 0.0
        out.state[:STATE] = observation
        if self._hides_goal:
            out.state[_GOAL] = 0.0
        if len(out.state) > STATE:
            out.state[STATE + self._envs[env_index][0]] = 1.0

    def render(self, env_index: int) -> ByteArray:
        """Return an upright image of the first camera."""
        return np.ascontiguousarray(
            self._render_camera(env_index, (*self.spec.cameras.names, "corner2")[0])[::-1, ::-1]
        )

    def expert(self, env_index: int) -> FloatArray:
        """Return the action of the package's scripted policy, which uses the goal."""
        task = self._cfg.names[self._envs[env_index][0]]
        return np.clip(experts.ENV_POLICY_MAP[task]().get_action(self._observations[env_index]), -1.0, 1.0).astype(
            np.float32
        )

    def close(self) -> None:
        """Free simulators and renderers; idempotent."""
        for _, env in [*self._envs.values(), *self._idle_envs]:
            env.close()
        self._envs.clear()
        self._idle_envs.clear()

    def _build(self, task: int) -> Any:
        params = self._cfg.init_params
        renders = bool(self.spec.cameras.names) or self._renders
        env: Any = ALL_V3_ENVIRONMENTS[self._cfg.names[task]](
            render_mode="rgb_array" if renders else None,
            camera_name="corner2",
            height=params.camera_heights,
            width=params.camera_widths,
        )
        env._set_task_called, env._freeze_rand_vec, env.seeded_rand_vec = True, False, True
        env._partially_observable = False
        vars(env).pop("sawyer_observation_space", None)  # cached while the goal is hidden; it would clip the goal to 0
        env.max_path_length = 10**9  # the run sets the time limit
        # This method takes half of the time of a step of push-v3, but only computes values in `info` that are unused.
        env.touching_object = lambda _: False
        env.model.camera("corner2").pos = _CORNER2
        if self._cfg.render_profile is RenderProfile.lean:
            env.model.vis.quality.offsamples = 0
            env.model.vis.quality.shadowsize = 0
        return env

    def _render_camera(self, env_index: int, camera: str) -> ByteArray:
        env = self._envs[env_index][1]
        env.mujoco_renderer.camera_id = mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
        return env.mujoco_renderer.render("rgb_array")


def _is_goal_reached(env: Any) -> bool:
    """Return True if the goal is already reached after a reset, without changing the environment.

    The observation of `reset` contains outdated object poses (a window that is still closed). The current poses
    need a forward pass, here on a copy: the next step must start from the package's own state.
    """
    space = env.sawyer_observation_space  # cached at its first use
    attributes = dict(vars(env))
    try:
        env.data = copy.copy(env.data)
        mujoco.mj_forward(env.model, env.data)
        observation = np.clip(env._get_obs(), space.low, space.high)
        return bool(env.evaluate_state(observation, np.zeros(4, np.float32))[1]["success"])
    finally:
        vars(env).clear()
        vars(env).update(attributes)
