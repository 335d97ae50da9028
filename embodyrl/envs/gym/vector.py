"""Natively vectorized Gymnasium environments: all slots of a worker are one `VectorEnv`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from embodyrl.envs.chunked import SimStep
from embodyrl.envs.gym.create import Probe
from embodyrl.envs.gym.sims import GymSims, succeeded
from embodyrl.types import EnvSpec, FloatArray


class VectorSims(GymSims):
    """Slots of one vector environment that leaves resets to us; implements `BatchedSimulators`."""

    def __init__(self, spec: EnvSpec, found: Probe, create: Callable[[int], Any], num_slots: int) -> None:
        super().__init__(spec, found, create)
        self._vector = create(num_slots)
        self._space = found.action_space
        self._actions = [self._native(np.zeros(spec.action_dim, np.float32))] * num_slots
        self._look(self._vector.reset(seed=[0] * num_slots)[0], range(num_slots))

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Start the slot's episode, whose seed is the reset id."""
        self._look(self._restart([slot], reset_id), [slot])

    def advance(self, actions: Mapping[int, FloatArray]) -> dict[int, SimStep]:
        """Step the whole batch; slots without an action repeat their last one."""
        for slot, action in actions.items():
            self._actions[slot] = self._native(action)
        batch = concatenate(self._space, self._actions, create_empty_array(self._space, len(self._actions)))
        seen, reward, terminated, truncated, infos = self._vector.step(batch)
        self._look(seen, actions)
        # The batch refuses to step an environment that ended; what its slot saw last is kept.
        if over := np.flatnonzero(terminated | truncated).tolist():
            self._restart(over, 0)
        success = np.broadcast_to(succeeded(infos), len(reward)).astype(bool)
        columns = (reward, terminated, success, truncated)
        return {
            slot: SimStep(reward=float(earned), terminated=ended, success=reached, truncated=cut)
            for slot, (earned, ended, reached, cut) in enumerate(zip(*(c.tolist() for c in columns), strict=True))
        }

    def close(self) -> None:
        if not self._vector.closed:
            self._vector.close()

    def _picture(self, slot: int) -> Any:
        return self._vector.render()[slot] if self._vector.render_mode == "rgb_array" else None

    def _restart(self, slots: list[int], seed: int) -> Any:
        """Reset some environments of the batch; return the batch's observation."""
        mask = np.zeros(len(self._actions), np.bool_)
        mask[slots] = True
        return self._vector.reset(seed=[seed] * len(mask), options={"reset_mask": mask})[0]

    def _look(self, batch: Any, slots: Any) -> None:
        items = list(iterate(self._vector.observation_space, batch))
        self._observations.update({slot: copy.deepcopy(items[slot]) for slot in slots})
