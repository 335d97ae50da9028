"""Episode semantics over simulators that step as arrays: `ChunkedEnv` with index arrays instead of loops over slots."""

from collections.abc import Sequence
from typing import Any, Never

import numpy as np

from embodyrl.envs.chunked import SimEnv
from embodyrl.envs.protocol import AfterStep
from embodyrl.envs.reward import StepReward
from embodyrl.envs.simulators import ArraySimulators
from embodyrl.errors import EnvError
from embodyrl.types import ByteArray, ChunkResult, DoubleArray, EpisodeStart, FloatArray, IntArray, ObservationOut

_NOTHING, _RUNNING, _OVER = 0, 1, 2
"""States of a slot."""


class ArrayEnv(SimEnv):
    """An `Env` over `ArraySimulators`; ends, rewards and errors as those of `ChunkedEnv`."""

    _sims: ArraySimulators

    def __init__(self, sims: ArraySimulators, num_slots: int, **rewards: Any) -> None:
        """`rewards`: see `SimEnv`."""
        super().__init__(sims.spec, **rewards)
        self.task_limit: int | None = None
        self._sims = sims
        self._first_ids = np.cumsum([0, *self.spec.states_per_task])
        self._phase = np.zeros(num_slots, np.int8)
        self._reset_id, self._steps, self._limit = (np.zeros(num_slots, np.int64) for _ in range(3))
        self._ignores, self._unjudged = np.zeros((2, num_slots), np.bool_)
        self._last = np.zeros(num_slots, np.float64)

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Begin an episode in each slot; EnvError for an unknown reset id or a time limit below 1."""
        self._check_starts(starts)
        rows = np.asarray(slots, np.int64)
        ids = np.asarray([start.reset_id for start in starts], np.int64)
        limits = np.asarray([start.max_episode_steps for start in starts], np.int64)
        # Until the simulator has begun: a reset that fails leaves no episode behind.
        self._phase[rows] = _NOTHING
        self._sims.begin(rows, ids, np.asarray([start.seed for start in starts], np.int64))
        self._reset_id[rows], self._limit[rows] = ids, limits
        self._ignores[rows], self._unjudged[rows] = [start.ignore_terminations for start in starts], False
        self._steps[rows], self._last[rows], self._phase[rows] = 0, 0.0, _RUNNING

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Run a chunk of actions [n, K, A] in the given slots; all result arrays are [n, K] (see `Env.step_chunk`)."""
        rows = np.asarray(slots, np.int64)
        self._check(rows, actions)
        shape = actions.shape[:2]
        result = ChunkResult.empty(*shape, parts=len(self.spec.components))
        for k in range(shape[1]):
            running = np.flatnonzero(self._phase[rows] == _RUNNING)
            if not running.size:
                break
            self._step(result, running, rows[running], actions[running, k], k)
            if after_step is not None:
                for row in running.tolist():
                    after_step(int(rows[row]), bool(result.success[row, k]))
        return result

    def _step(self, result: ChunkResult, running: IntArray, slots: IntArray, actions: FloatArray, k: int) -> None:
        """Execute one action in the running rows of a chunk and note what it brought."""
        step = self._sims.advance(slots, actions)
        reward = np.asarray(step.reward, np.float64)
        for name in ("reward", "terminated", "success", "truncated"):
            if (shape := np.shape(getattr(step, name))) != slots.shape:
                raise EnvError(f"env '{self.spec.name}': advance returned {name} {shape}, expected {slots.shape}.")
        if not np.isfinite(reward).all():
            bad = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise self._diverged(int(slots[bad]), float(reward[bad]))
        self._steps[slots] += 1
        earned = reward - self._last[slots] if self._relative else reward
        self._last[slots] = reward
        # A goal that is reached at the time limit ends the episode: nothing is bootstrapped then.
        ended = np.asarray(step.terminated, np.bool_) & ~self._ignores[slots]
        cut = (np.asarray(step.truncated, np.bool_) | (self._steps[slots] >= self._limit[slots])) & ~ended
        self._phase[slots[ended | cut]] = _OVER
        result.valid[running, k] = True
        result.success[running, k] = step.success
        result.terminated[running, k], result.truncated[running, k] = ended, cut
        if self._own is not None:
            earned = self._own_rewards(self._own, result, running, slots, actions, (k, earned))
        result.reward[running, k] = self._coef * earned

    def _own_rewards(
        self,
        own: StepReward,
        result: ChunkResult,
        running: IntArray,
        slots: IntArray,
        actions: FloatArray,
        simulated: tuple[int, DoubleArray],
    ) -> DoubleArray:
        """Ask the user's function about each slot; `simulated`: place in the chunk, and what is earned without it."""
        earned = np.zeros(len(slots))
        for place, (row, slot) in enumerate(zip(running.tolist(), slots.tolist(), strict=True)):
            rewards = float(self._last[slot]), float(simulated[1][place])
            at = row, simulated[0]
            earned[place], why = self._own_reward(own, result, at, slot, actions[place], rewards)
            if why is not None and not self._unjudged[slot]:  # once an episode, which counts as one
                self._unjudged[slot] = True
                result.unjudged[slot] = f"{self._where(slot)}: {why}"
        return earned

    def expert_chunk(self, *_: Any, **__: Any) -> Never:
        """There is none, EnvError."""
        raise EnvError(f"env '{self.spec.name}' steps as arrays and has no scripted expert.")

    def observe_batch(self, slots: Sequence[int], images: ByteArray, state: FloatArray) -> None:
        """Write what the slots show into arrays [n, C, H, W, 3] and [n, S]."""
        rows = np.asarray(slots, np.int64)
        self._require_begun(rows)
        self._sims.observe(rows, images, state)

    def observe(self, slots: Sequence[int], outs: Sequence[ObservationOut]) -> None:
        """Write what each slot shows into its views."""
        for slot, out in zip(slots, outs, strict=True):
            self.observe_batch([slot], out.images[None], out.state[None])

    def tasks_of(self, slots: IntArray) -> IntArray:
        """Task ids [n] of the slots' episodes."""
        return np.searchsorted(self._first_ids, self._reset_id[slots], side="right") - 1

    def _observe_into(self, slot: int, out: ObservationOut) -> None:
        self._sims.observe(np.array([slot]), out.images[None], out.state[None])

    def _check(self, slots: IntArray, actions: FloatArray) -> None:
        self._require_begun(slots)
        if (over := slots[self._phase[slots] == _OVER]).size:
            raise self._over(int(over[0]))
        self._check_actions(slots.tolist(), actions)

    def _require_begun(self, slots: IntArray) -> None:
        if (idle := slots[self._phase[slots] == _NOTHING]).size:
            raise self._without_episode(int(idle[0]))

    def _stand(self, slot: int) -> tuple[int, int]:
        self._require_begun(np.array([slot]))
        return int(self._reset_id[slot]), int(self._steps[slot])
