"""ManiSkill as slot simulators: several CPU simulators in one process share the renderer and its shaders."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodyrl.envs.maniskill.expert import Expert
from embodyrl.envs.maniskill.settings import BRIDGE_EPISODES, ManiSkillSettings
from embodyrl.envs.maniskill.simulator import build, restart, restart_rows, state
from embodyrl.envs.simulators import BatchedSimulators, SimStep, SlotSimulators
from embodyrl.types import ByteArray, EnvSpec, EpisodeStart, FloatArray, ObservationOut


class ManiSkillSims(SlotSimulators):
    """Slots of one task. Nothing is drawn but what is observed or recorded."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings) -> None:
        super().__init__(spec)
        self._cfg = cfg
        # Tasks on Bridge data have no reward of their own.
        self._rewarded = cfg.reward_mode != "none" and cfg.id not in BRIDGE_EPISODES
        self._envs: dict[int, Any] = {}
        self._infos: dict[int, dict[str, Any]] = {}
        self._experts: dict[int, Expert] = {}

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Start the episode of the reset id, which decides everything."""
        if slot not in self._envs:
            self._envs[slot] = build(self._cfg, self._cfg.obs_mode)
        self._infos[slot] = restart(self._cfg, self._envs[slot], reset_id, self.spec.cameras)
        self._experts.pop(slot, None)

    def step(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A], which ManiSkill clips to its bounds."""
        _, reward, terminated, _, self._infos[slot] = self._envs[slot].step(action)
        return self._outcomes(reward, terminated, self._infos[slot])[0]

    def expert(self, slot: int) -> FloatArray:
        """Return the action [7] of the slot's expert, who begins with its episode."""
        if slot not in self._experts:
            self._experts[slot] = Expert(self._envs[slot], self.spec.name)
        return self._experts[slot].act()

    def observe(self, slot: int, out: ObservationOut) -> None:
        """Draw the cameras of the spec and write the state vector into the views."""
        self._write(self._look(self._envs[slot], self._infos[slot]), 0, out)

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's camera to look at."""
        return self._envs[slot].render_rgb_array()[0].numpy()

    def info(self, slot: int) -> dict[str, Any]:
        """What the task evaluates, as numbers."""
        return _row(self._infos[slot], 0)

    def close(self) -> None:
        """Free the simulators; idempotent."""
        while self._envs:
            self._envs.popitem()[1].close()

    def _outcomes(self, reward: Any, terminated: Any, info: dict[str, Any]) -> list[SimStep]:
        """What a step brought each environment of a batch."""
        success = info.get("success", terminated & False)
        columns = (reward if self._rewarded else success, terminated, success)
        return [
            SimStep(reward=float(earned), terminated=ended, success=reached)
            for earned, ended, reached in zip(*(column.cpu().tolist() for column in columns), strict=True)
        ]

    def _look(self, env: Any, info: dict[str, Any]) -> list[np.ndarray]:
        """States [N, S] and pictures [N, H, W, 3] of the spec's cameras."""
        pictures = env._get_obs_sensor_data() if self.spec.cameras else {}
        seen = [state(env, self._cfg.obs_mode, info), *(pictures[camera]["rgb"] for camera in self.spec.cameras)]
        return [part.cpu().numpy() for part in seen]

    def _write(self, seen: list[np.ndarray], row: int, out: ObservationOut) -> None:
        out.state[:] = seen[0][row]
        for view, picture in zip(out.images, seen[1:], strict=True):
            view[...] = picture[row]


class BatchSims(ManiSkillSims, BatchedSimulators):
    """Slots of one simulation of them all."""

    def __init__(self, spec: EnvSpec, cfg: ManiSkillSettings, num_slots: int) -> None:
        super().__init__(spec, cfg)
        self._env = build(cfg, cfg.obs_mode, num_slots)
        self._envs[0] = self._env  # closed with it
        self._actions = np.zeros((num_slots, spec.action_dim), np.float32)
        self._info: dict[str, Any] = {}
        self._seen: list[np.ndarray] = []

    def begin(self, starts: Mapping[int, EpisodeStart]) -> None:
        """Start the episodes of the reset ids."""
        reset_ids = {slot: start.reset_id for slot, start in starts.items()}
        self._info = restart_rows(self._cfg, self._env, reset_ids, self.spec.cameras)
        self._seen = []

    def advance(self, actions: Mapping[int, FloatArray]) -> Mapping[int, SimStep]:
        """Step the whole batch; slots without an action repeat their last one."""
        for slot, action in actions.items():
            self._actions[slot] = action
        _, reward, terminated, _, self._info = self._env.step(self._actions)
        self._seen = []
        return dict(enumerate(self._outcomes(reward, terminated, self._info)))

    def observe(self, slot: int, out: ObservationOut) -> None:
        """Copy the slot's part of what was drawn and read for all slots at once."""
        if not self._seen:
            self._seen = self._look(self._env, self._info)
        self._write(self._seen, slot, out)

    def render(self, slot: int) -> ByteArray:
        """Return a frame of ManiSkill's camera to look at."""
        return self._env.render_rgb_array()[slot].cpu().numpy()

    def info(self, slot: int) -> dict[str, Any]:
        """What the task evaluates for the slot, as numbers."""
        return _row(self._info, slot)


def _row(info: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: value[row].tolist() if getattr(value, "ndim", 0) else value for name, value in info.items()}
