"""A toy environment for tests of the loop: one to three tasks, success depends on the actions alone.

Each step adds the mean of the first action dimension to a position; the goal lies at +2 (task 0) or -2 (task 1, ...).
`env.kwargs` makes it misbehave: {"fault": "raise|kill|hang|nan", "at_step": n, "once": path of a marker file}.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.chunked import ChunkedEnv, SimStep
from embodyrl.types import ByteArray, EnvSpec, FloatArray, GripperConvention, ObservationOut

GOAL = 2.0


class ToySims:
    """`SlotSimulators` of the toy task."""

    def __init__(self, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
        self.spec = spec
        self.task_limit = kwargs.get("task_limit")
        self._fault = kwargs.get("fault")
        self._at_step = int(kwargs.get("at_step", 0))
        self._once = Path(kwargs["once"]) if "once" in kwargs else None
        self._position: dict[int, float] = {}
        self._task: dict[int, int] = {}
        self._executed = 0

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        self._task[slot], state = self.spec.task_of(reset_id)
        self._position[slot] = 0.1 * state + 0.01 * (seed % 7)

    def step(self, slot: int, action: FloatArray) -> SimStep:
        self._executed += 1
        if self._fault and self._executed >= self._at_step and self._take_turn():
            return self._misbehave()
        self._position[slot] += float(action[0])
        sign = 1.0 if self._task[slot] == 0 else -1.0
        success = sign * self._position[slot] > GOAL
        return SimStep(reward=float(success), terminated=success, success=success)

    def _take_turn(self) -> bool:
        if self._once is None:
            return True
        try:
            self._once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _misbehave(self) -> SimStep:
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "hang":
            time.sleep(3600)
        if self._fault == "nan":
            return SimStep(reward=float("nan"), terminated=False, success=False)
        raise RuntimeError("the toy broke")

    def observe(self, slot: int, out: ObservationOut) -> None:
        height, width = self.spec.image_size
        out.images[...] = np.uint8(40 * (1 + self._task[slot]))
        column = int(np.clip((self._position[slot] + 4) / 8, 0, 0.99) * width)
        out.images[0, height // 2, column] = 255
        out.state[:] = self._position[slot]

    def instruction(self, slot: int) -> str:
        return self.spec.tasks[self._task[slot]]

    def render(self, slot: int) -> ByteArray:
        frame = np.zeros((1, *self.spec.image_size, 3), np.uint8)
        self.observe(slot, ObservationOut(images=frame, state=np.zeros(1, np.float32)))
        return frame[0]

    def close(self) -> None:
        pass


class ToyFactory:
    """`EnvFactory` of the toy task."""

    consumes = frozenset({"kwargs", "use_rel_reward", "reward_coef", "init_params"})

    def validate(self, cfg: EnvConfig) -> list[str]:
        return []

    def spec(self, cfg: EnvConfig) -> EnvSpec:
        tasks = int(cfg.kwargs.get("tasks", 1))
        return EnvSpec(
            name="toy",
            action_dim=7,
            tasks=("go right", "go left", "go left again")[:tasks],
            states_per_task=(4,) * tasks,
            cameras=("front",),
            image_size=(16, 24),
            state_dim=1,
            gripper=GripperConvention(open=-1.0, closed=1.0, binary=True),
            unnorm_key="libero_10_no_noops",
            max_episode_steps=32,
        )

    def make(self, cfg: EnvConfig, num_slots: int) -> ChunkedEnv:
        return ChunkedEnv(
            ToySims(self.spec(cfg), cfg.kwargs),
            num_slots,
            use_rel_reward=cfg.use_rel_reward,
            reward_coef=cfg.reward_coef,
        )


FACTORY = ToyFactory()
