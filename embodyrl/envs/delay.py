"""Inference delay: a chunk begins some env steps after its observation; until then, the previous chunk continues.

A chunk has K actions. Its last D actions, where D is the largest delay, are for env steps that the next chunk also
covers, so there is one observation every s = K - D steps. The chunk for the observation of step t has a delay d of at
most D and executes its actions d..s-1 at steps t+d..t+s-1. Until the next chunk begins, after delay d', its actions
s..s+d'-1 follow. The first chunk of an episode has no delay: its actions start at 0. Delays are numbers of env steps,
so the results do not depend on the speed of the policy.

The record of a chunk contains only the results of its executed actions; `valid` is False for its other actions.
Algorithms therefore need no changes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import AfterStep
from embodyrl.envs.simulators import Simulators
from embodyrl.errors import ConfigError
from embodyrl.types import ByteArray, ChunkResult, EnvSpec, EpisodeStart, FloatArray, IntArray


def check_delay(spec: EnvSpec, max_delay: int, chunk: int) -> None:
    """Check that an environment supports delays up to `max_delay` env steps and chunks of `chunk` actions (0: unknown).

    Raises:
        ConfigError: the chunks are too short, or the simulator can only step all its environments at once.
    """
    problems = []
    if 0 < chunk < 2 * max_delay:
        problems.append(
            f"env.control.latency_steps={max_delay} does not fit into chunks of {chunk} actions: a chunk must have at "
            f"least twice as many actions. Set model.num_action_chunks to {2 * max_delay} or more, or lower the delay."
        )
    if spec.simulator.lockstep:
        problems.append(
            f"env '{spec.name}' steps all parallel environments together, but a delay needs independent steps. Set "
            "env.control.latency_steps=0, or use another env."
        )
    if problems:
        raise ConfigError(problems)


class DelayedEnv(ChunkedEnv):
    """Environment with an inference delay: each action chunk begins some env steps after its observation."""

    def __init__(self, sims: Simulators, num_envs: int, *, delay: tuple[int, int], **options: Any) -> None:
        """Create the environment. Each chunk samples its delay uniformly between the two values of `delay`.

        `options` are the other arguments of `ChunkedEnv`.
        """
        super().__init__(sims, num_envs, **options)
        self._min_delay, self._max_delay = delay
        # Per environment: number of executed chunks, and index of the first action of the next chunk that will be
        # executed.
        self._chunks, self._first_action = np.zeros((2, num_envs), np.int64)
        cameras = self.spec.cameras
        self._images = np.zeros((num_envs, len(cameras.names), *cameras.size, 3), np.uint8)
        self._state = np.zeros((num_envs, self.spec.state_dim), np.float32)

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each environment."""
        super().reset(env_indices, starts)
        rows = np.array(env_indices, np.int64)
        self._chunks[rows] = self._first_action[rows] = 0
        self._store_observations(env_indices)

    def step_chunk(
        self, env_indices: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute the chunks [n, K, A] without the actions that the previous or the next chunk replaces."""
        period = actions.shape[1] - self._max_delay
        result = ChunkResult.empty(len(env_indices), actions.shape[1], num_components=len(self.spec.reward.components))
        groups: dict[tuple[int, int], list[int]] = {}
        for row, env_index in enumerate(env_indices):
            first_action, self._chunks[env_index] = int(self._first_action[env_index]), self._chunks[env_index] + 1
            self._first_action[env_index] = delay = self._sample_delay(env_index)
            groups.setdefault((first_action, delay), []).append(row)
        for (first_action, delay), rows in groups.items():
            running = self._execute_part(result, rows, env_indices, actions, slice(first_action, period), after_step)
            self._store_observations([env_indices[row] for row in rows])
            self._execute_part(result, running, env_indices, actions, slice(period, period + delay), after_step)
        return result

    def _sample_delay(self, env_index: int) -> int:
        """Return the delay of the next chunk; it depends only on the episode and the number of the chunk."""
        rng = np.random.default_rng([self._seed[env_index], self._reset_id[env_index], self._chunks[env_index]])
        return int(rng.integers(self._min_delay, self._max_delay + 1))

    def _execute_part(
        self,
        result: ChunkResult,
        rows: list[int],
        env_indices: Sequence[int],
        actions: FloatArray,
        part: slice,
        after_step: AfterStep | None,
    ) -> list[int]:
        """Execute the slice `part` of each chunk in `rows`; return the rows whose episode continues."""
        if part.start == part.stop or not rows:
            return rows
        part_result = super().step_chunk([env_indices[row] for row in rows], actions[rows, part], after_step=after_step)
        for name in ("reward", "terminated", "truncated", "valid", "success"):
            getattr(result, name)[rows, part] = getattr(part_result, name)
        if result.components is not None and part_result.components is not None:
            result.components[rows] += part_result.components
        result.reward_errors.update(part_result.reward_errors)
        return [row for row, has_ended in zip(rows, part_result.done.tolist(), strict=True) if not has_ended]

    def _store_observations(self, env_indices: Sequence[int]) -> None:
        """Store the current observations, from which the policy computes the next chunk."""
        super().observe(env_indices, self._images, self._state, np.array(env_indices, np.int64))

    def observe(
        self, env_indices: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None
    ) -> None:
        """Write the observation of the next chunk of each environment (see `Env.observe`)."""
        rows = np.arange(len(env_indices)) if rows is None else rows
        images[rows], state[rows] = self._images[list(env_indices)], self._state[list(env_indices)]
