"""ManiSkill as slot simulators: several CPU simulators in one process share the renderer and its shaders."""

from __future__ import annotations

from typing import Any

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.chunked import SimStep
from embodyrl.envs.maniskill.expert import Demonstrator
from embodyrl.envs.maniskill.simulator import build, restart, state
from embodyrl.envs.maniskill.tasks import BRIDGE_EPISODES
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut


class ManiSkillSims:
    """Slots of one task; implements `SlotSimulators`. Nothing is drawn but what is observed or recorded."""

    task_limit: int | None = None

    def __init__(self, spec: EnvSpec, cfg: EnvConfig) -> None:
        self.spec = spec
        self._cfg = cfg
        # Tasks on Bridge data have no reward of their own.
        self._rewarded = cfg.reward_mode != "none" and cfg.id not in BRIDGE_EPISODES
        self._envs: dict[int, Any] = {}
        self._infos: dict[int, dict[str, Any]] = {}
        self._demonstrators: dict[int, Demonstrator] = {}

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Start the episode of the reset id, which decides everything."""
        if slot not in self._envs:
            self._envs[slot] = build(self._cfg, self._cfg.obs_mode)
        self._infos[slot] = restart(self._cfg, self._envs[slot], reset_id, self.spec.cameras)
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
        out.state[:] = state(env, self._cfg.obs_mode, self._infos[slot]).numpy()

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's camera for people."""
        return self._envs[slot].render_rgb_array()[0].numpy()

    def close(self) -> None:
        """Free the simulators; idempotent."""
        while self._envs:
            self._envs.popitem()[1].close()
