"""Scripted test doubles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embodyrl.envs.simulators import SequentialSimulators, SimStep, SimSteps
from embodyrl.types import (
    ActionSpec,
    ByteArray,
    CameraSpec,
    EnvSpec,
    FloatArray,
    IntArray,
    ObservationOut,
    SimulatorSpec,
)


def steps_of(rewards: Sequence[float], *, success: Sequence[int] = (), terminated: Sequence[int] = ()) -> list[SimStep]:
    """Return one `SimStep` per reward; `success` and `terminated` are the steps with these flags."""
    return [
        SimStep(reward=reward, terminated=index in terminated, success=index in success)
        for index, reward in enumerate(rewards)
    ]


class ScriptedSims(SequentialSimulators):
    """Simulators that play one script of `SimStep`s per reset id; the last step repeats.

    Image pixels contain the number of executed steps, the state [2] contains (reset id, executed steps).
    `log` records every call as ("reset", environment, reset_id, seed) or ("step", environment, first action value).
    """

    def __init__(self, scripts: Sequence[Sequence[SimStep]], *, states_per_task: int = 1, action_dim: int = 2) -> None:
        assert len(scripts) % states_per_task == 0
        num_tasks = len(scripts) // states_per_task
        spec = EnvSpec(
            name="scripted",
            action=ActionSpec(dim=action_dim),
            tasks=tuple(f"do thing {task}" for task in range(num_tasks)),
            states_per_task=(states_per_task,) * num_tasks,
            cameras=CameraSpec(names=("front",), size=(4, 6)),
            state_dim=2,
            max_episode_steps=max(len(script) for script in scripts),
        )
        super().__init__(spec)
        self.scripts = scripts
        self.log: list[tuple[object, ...]] = []
        self.closed = False
        self._at: dict[int, tuple[int, int]] = {}

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        self.log.append(("reset", env_index, reset_id, seed))
        self._at[env_index] = (reset_id, 0)

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        assert action.shape == (self.spec.action.dim,)
        self.log.append(("step", env_index, float(action[0])))
        reset_id, index = self._at[env_index]
        self._at[env_index] = (reset_id, index + 1)
        script = self.scripts[reset_id]
        return script[min(index, len(script) - 1)]

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        out.images[...] = self._at[env_index][1]
        out.state[:] = self._at[env_index]

    def render(self, env_index: int) -> ByteArray:
        return np.full((*self.spec.cameras.size, 3), self._at[env_index][1], np.uint8)

    def close(self) -> None:
        self.closed = True


class ScriptedBatch(ScriptedSims):
    """A batch of environments that step together, including ended and waiting environments."""

    def __init__(self, scripts: Sequence[Sequence[SimStep]]) -> None:
        super().__init__(scripts)
        self.spec = replace(self.spec, simulator=SimulatorSpec(lockstep=True))

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        starts = dict(zip(env_indices.tolist(), reset_ids.tolist(), strict=True))
        self.log.append(("begin", starts))
        self._at.update({env_index: (reset_id, 0) for env_index, reset_id in starts.items()})

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        every = np.array(sorted(self._at))
        given = np.zeros((len(every), self.spec.action.dim), np.float32)
        given[np.searchsorted(every, env_indices)] = actions
        return super().step(every, given).select(np.searchsorted(every, env_indices))
