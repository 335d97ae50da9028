"""ManiSkill as slot simulators: several CPU simulators in one process share the renderer and its shaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
        out.state[:] = state(env, self._cfg.obs_mode, self._infos[slot])[0].numpy()

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's camera for people."""
        return self._envs[slot].render_rgb_array()[0].numpy()

    def close(self) -> None:
        """Free the simulators; idempotent."""
        while self._envs:
            self._envs.popitem()[1].close()


class BatchSims(ManiSkillSims):
    """Slots of one simulation of them all; implements `BatchedSimulators`."""

    def __init__(self, spec: EnvSpec, cfg: EnvConfig, num_slots: int) -> None:
        super().__init__(spec, cfg)
        self._env = build(cfg, cfg.obs_mode, num_slots)
        self._envs[0] = self._env  # closed with it
        self._actions = np.zeros((num_slots, spec.action_dim), np.float32)
        self._steps: dict[int, SimStep] = {}
        self._info: dict[str, Any] = {}
        self._seen: list[np.ndarray] = []

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Start the episode of the reset id."""
        self._info = restart(self._cfg, self._env, reset_id, self.spec.cameras, slot)
        self._seen = []

    def advance(self, actions: Mapping[int, FloatArray]) -> None:
        """Step the whole batch; slots without an action repeat their last one."""
        for slot, action in actions.items():
            self._actions[slot] = action
        _, reward, terminated, _, self._info = self._env.step(self._actions)
        self._seen = []
        success = self._info.get("success", terminated & False)
        rewards = reward if self._rewarded else success
        columns = (column.cpu().tolist() for column in (rewards, terminated, success))
        for slot, (earned, ended, reached) in enumerate(zip(*columns, strict=True)):
            self._steps[slot] = SimStep(reward=float(earned), terminated=ended, success=reached)

    def step(self, slot: int, action: FloatArray) -> SimStep:
        """Tell what the batch's step did to the slot."""
        return self._steps[slot]

    def observe(self, slot: int, out: ObservationOut) -> None:
        """Copy the slot's part of what was drawn and read for all slots at once."""
        if not self._seen:
            pictures = self._env._get_obs_sensor_data() if self.spec.cameras else {}
            seen = [state(self._env, self._cfg.obs_mode, self._info), *(pictures[c]["rgb"] for c in self.spec.cameras)]
            self._seen = [part.cpu().numpy() for part in seen]
        out.state[:] = self._seen[0][slot]
        for view, picture in zip(out.images, self._seen[1:], strict=True):
            view[...] = picture[slot]

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's camera for people."""
        return self._env.render_rgb_array()[slot].cpu().numpy()
