"""ManiSkill as slot simulators: several CPU simulators in one process share the renderer and its shaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from embodyrl.config.schema import ObsMode
from embodyrl.envs.chunked import SimStep
from embodyrl.envs.maniskill.expert import Demonstrator
from embodyrl.envs.maniskill.simulator import state
from embodyrl.envs.maniskill.tasks import BRIDGE_EPISODES
from embodyrl.errors import EnvError
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut


class ManiSkillSims:
    """Slots of one task; implements `SlotSimulators`. Nothing is drawn but what is observed or recorded."""

    task_limit: int | None = None

    def __init__(self, spec: EnvSpec, mode: ObsMode, build: Callable[[], Any], *, rewarded: bool) -> None:
        """Describe the slots; each one is built at its first reset.

        Args:
            spec: of the task.
            mode: what the state vector holds.
            build: builds one simulator.
            rewarded: the task's own reward counts; false: success is the reward.
        """
        self.spec = spec
        self._mode = mode
        self._build = build
        self._rewarded = rewarded
        self._envs: dict[int, Any] = {}
        self._infos: dict[int, dict[str, Any]] = {}
        self._demonstrators: dict[int, Demonstrator] = {}

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Start the episode whose seed (Bridge data: whose numbered placement) is the reset id."""
        if slot not in self._envs:
            self._envs[slot] = self._new()
        env = self._envs[slot]
        numbered = self.spec.name in BRIDGE_EPISODES
        options = {"episode_id": reset_id} if numbered else {}
        # PhysX remembers more than ManiSkill resets (what sleeps, for one): without a step from the very same state the
        # former episode would show in the last bits.
        env.reset(seed=reset_id, options=dict(options))
        env._step_action(None)
        _, self._infos[slot] = env.reset(seed=reset_id, options=dict(options))
        self._demonstrators.pop(slot, None)

    def step(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A], which ManiSkill clips to its bounds."""
        _, reward, terminated, _, info = self._envs[slot].step(action)
        self._infos[slot] = info
        success = bool(info["success"]) if "success" in info else False
        return SimStep(
            reward=float(reward) if self._rewarded else float(success), terminated=bool(terminated), success=success
        )

    def expert(self, slot: int) -> FloatArray:
        """Return the demonstrator's next action [7]."""
        if slot not in self._demonstrators:
            self._demonstrators[slot] = Demonstrator(self._envs[slot], self.spec.name)
        return self._demonstrators[slot].act()

    def observe(self, slot: int, out: ObservationOut) -> None:
        """Draw the cameras of the spec and write the state vector into the views."""
        env = self._envs[slot]
        if self.spec.cameras:
            pictures = env._get_obs_sensor_data()
            for view, camera in zip(out.images, self.spec.cameras, strict=True):
                view[...] = pictures[camera]["rgb"][0].numpy()
        out.state[:] = state(env, self._mode, self._infos[slot]).numpy()
        if not np.isfinite(out.state).all():
            raise EnvError(
                f"env '{self.spec.name}' observed {out.state[~np.isfinite(out.state)][0]}, expected finite numbers. "
                "Likely the physics diverged; the episode cannot be used."
            )

    def instruction(self, slot: int) -> str:
        """Language instruction of the task."""
        return self.spec.tasks[0]

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's camera for people."""
        return self._envs[slot].render_rgb_array()[0].numpy()

    def close(self) -> None:
        """Free the simulators; idempotent."""
        while self._envs:
            self._envs.popitem()[1].close()

    def _new(self) -> Any:
        env = self._build()
        if self._mode is ObsMode.rgb:
            # A step would draw all cameras; `observe` draws those of the spec when somebody looks.
            env._obs_mode = "none"
        for camera in [name for name in env.scene.sensors if name not in self.spec.cameras]:
            del env.scene.sensors[camera]
        return env
