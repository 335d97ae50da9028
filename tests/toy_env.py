"""A toy environment for tests of the training loop: one to three tasks, success depends on the actions only.

Each step adds the first action dimension to a position; the goal is at +2 (task 0) or -2 (task 1, ...). Settings in
`env.kwargs`: `tasks`, `task_limit`, `lockstep`, `goal`, `echo` (the reward is the first action dimension, nothing
ends), `reward` (given in every step instead of 1 at success), and one fault: {"fault":
"raise|differ|kill|segv|exit|hang|spin|slow|flood|nonfinite|gate|fill", "where": "init|reset|step|observe", "at": the
first call with the fault, or a list of calls, "once": path of a marker file that limits the fault (at each of these
calls) to one process, "after": path of a file that must exist, "state": the initial state}.
"differ" raises an error with another message each time.
A "gate" creates its marker and waits until the file "<marker>.open" exists; "fill" fills the file system of its marker
except for `left` bytes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import CameraSettings, EnvSettings, RewardSettings
from embodyrl.envs.simulators import SequentialSimulators, SimStep
from embodyrl.types import (
    ActionSpec,
    BenchmarkSpec,
    ByteArray,
    CameraSpec,
    EnvCosts,
    EnvSpec,
    ExpertSpec,
    FloatArray,
    GripperConvention,
    ObservationOut,
    SimulatorSpec,
)


def wait_at_gate(marker: Path) -> None:
    """Create the marker, then wait until the gate is opened."""
    marker.touch()
    while not marker.with_name(marker.name + ".open").exists():
        time.sleep(0.02)


class ToySims(SequentialSimulators):
    """The toy task."""

    def __init__(self, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.task_limit = kwargs.get("task_limit")
        self._kwargs = kwargs
        self._goal = float(kwargs.get("goal", 2.0))
        self._once = Path(kwargs["once"]) if "once" in kwargs else None
        self._position: dict[int, float] = {}
        self._task: dict[int, int] = {}
        self._state: dict[int, int] = {}
        self._calls: Counter[str] = Counter()
        self._maybe_misbehave("init")

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        self._maybe_misbehave("reset")
        self._task[env_index], state = self.spec.task_of(reset_id)
        self._state[env_index] = state
        self._position[env_index] = 0.1 * state + 0.01 * (seed % 7)

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        meant = self._kwargs.get("state", self._state[env_index]) == self._state[env_index]
        fault = self._maybe_misbehave("step") if meant else None
        if "echo" in self._kwargs:
            echo = float("nan") if fault == "nonfinite" else float(action[0])
            return SimStep(reward=echo, terminated=False, success=False)
        self._position[env_index] += float(action[0])
        sign = 1.0 if self._task[env_index] == 0 else -1.0
        success = sign * self._position[env_index] > self._goal
        reward = float("nan") if fault == "nonfinite" else float(self._kwargs.get("reward", success))
        return SimStep(reward=reward, terminated=success, success=success)

    def _maybe_misbehave(self, where: str) -> str | None:
        """Return the due fault if it is not executed here."""
        self._calls[where] += 1
        fault = self._kwargs.get("fault")
        at = self._kwargs.get("at", 1)
        late = [call for call in (at if isinstance(at, list) else [at]) if self._calls[where] >= int(call)]
        if "after" in self._kwargs and not Path(self._kwargs["after"]).exists():
            return None
        if fault is None or where != self._kwargs.get("where", "step") or not any(map(self._take_turn, late)):
            return None
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segv":
            ctypes.string_at(0)
        if fault == "exit":
            os._exit(7)
        if fault == "spin":
            re.match(r"(a+)+b", "a" * 64)  # years in C, with the interpreter lock held
        if fault == "slow":
            time.sleep(0.05)
        if fault == "flood":
            for _ in range(100):
                os.write(1, bytes(range(256)) * 4096)
        if fault == "hang":
            time.sleep(3600)
        if fault == "gate":
            assert self._once is not None
            wait_at_gate(self._once)
        if fault == "fill":
            assert self._once is not None
            free = shutil.disk_usage(self._once.parent).free
            self._once.write_bytes(bytes(free - int(self._kwargs.get("left", 0))))
        if fault == "raise":
            raise RuntimeError("the toy broke")
        if fault == "differ":
            raise RuntimeError(f"the toy broke at {time.perf_counter_ns()}")
        return fault

    def expert(self, env_index: int) -> FloatArray:
        action = np.zeros(7, np.float32)
        action[0] = 0.5 if self._task[env_index] == 0 else -0.5
        return action

    def _take_turn(self, call: int) -> bool:
        if self._once is None:
            return True
        several = isinstance(self._kwargs.get("at"), list)
        try:
            (self._once.with_name(f"{self._once.name}.{call}") if several else self._once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        height, width = self.spec.cameras.size
        out.images[...] = np.uint8(40 * (1 + self._task[env_index]))
        fault = self._maybe_misbehave("observe")
        column = int(np.clip((self._position[env_index] + 4) / 8, 0, 0.99) * width)
        out.images[0, height // 2, column] = 255
        out.state[:] = np.nan if fault == "nonfinite" else self._position[env_index]

    def render(self, env_index: int) -> ByteArray:
        frame = np.zeros((1, *self.spec.cameras.size, 3), np.uint8)
        self.observe_env(env_index, ObservationOut(images=frame, state=np.zeros(1, np.float32)))
        return frame[0]

    def info(self, env_index: int) -> dict[str, Any]:
        return {"position": self._position[env_index]}


class ToySettings(EnvSettings, RewardSettings, CameraSettings):
    """Keys of the toy task."""

    kwargs: dict[str, Any] = {}
    """See the module docstring."""

    @property
    def title(self) -> str:
        """Name of the environment, by which evaluation protocols list it."""
        return "toy"


class ToyFactory(SimFactory[ToySettings]):
    """`EnvFactory` of the toy task."""

    settings = ToySettings

    def describe(self, cfg: ToySettings, context: EnvContext) -> EnvSpec:
        return replace(
            toy_spec(int(cfg.kwargs.get("tasks", 1))),
            simulator=SimulatorSpec(
                lockstep=bool(cfg.kwargs.get("lockstep")), on_gpu=True if "gpu_bytes" in cfg.kwargs else None
            ),
        )

    def costs(self, cfg: ToySettings, spec: EnvSpec) -> EnvCosts:
        return EnvCosts(
            **{key: cfg.kwargs[key] for key in ("gpu_bytes", "host_bytes", "task_bytes") if key in cfg.kwargs}
        )

    def simulators(self, cfg: ToySettings, context: EnvContext) -> ToySims:
        return ToySims(self.describe(cfg, context), cfg.kwargs)


def toy_spec(tasks: int = 1) -> EnvSpec:
    """One task by default; every task has four initial states."""
    spec = EnvSpec(
        name="toy",
        action=ActionSpec(dim=7, gripper=GripperConvention(open=-1.0, closed=1.0, binary=True)),
        tasks=("go right", "go left", "go left again"),
        states_per_task=(4, 4, 4),
        cameras=CameraSpec(names=("front",), size=(16, 24)),
        state_dim=1,
        benchmark=BenchmarkSpec(unnorm_key="libero_10_no_noops"),
        max_episode_steps=32,
        expert=ExpertSpec(tasks=tuple(range(tasks))),
        seeded_tasks=tuple(range(tasks)),
    )
    return replace(spec, tasks=spec.tasks[:tasks], states_per_task=spec.states_per_task[:tasks])


FACTORY = ToyFactory()
