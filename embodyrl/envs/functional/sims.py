"""Simulators for JAX environments: one compiled call steps all environments of a batch."""

from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.functional.functions import Array, Functions, StepResult
from embodyrl.envs.simulators import SimSteps, Simulators
from embodyrl.types import ActionKind, ByteArray, EnvSpec, FloatArray, IntArray


class FunctionalSims(Simulators):
    """Simulators of one batched JAX environment; environments that are not stepped keep their state.

    The reset id determines an episode's random key, from which the key of each step is derived.
    """

    def __init__(self, spec: EnvSpec, functions: Functions, num_envs: int) -> None:
        super().__init__(spec)
        self._discrete = spec.action.kind is ActionKind.discrete
        low, high = spec.action.bounds
        self._low, self._high = np.array(low, np.float32), np.array(high, np.float32)
        self._shape = num_envs, spec.action.dim
        self._ids = np.zeros(num_envs, np.uint32)
        self._step_counts = np.zeros(num_envs, np.uint32)
        reset_all, self._reset_masked, self._step = _compile_functions(functions, self._discrete)
        self._current: StepResult = reset_all(self._ids.copy())

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Start an episode in each given environment; the other environments keep their state."""
        self._ids[env_indices], self._step_counts[env_indices] = reset_ids, 0
        self._current = self._reset_masked(self._current, self._get_mask(env_indices), self._ids.copy())

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        """Execute one action in each of the environments, in one compiled call."""
        batch = np.zeros(self._shape, np.float32)
        batch[env_indices] = np.clip(actions, self._low, self._high)
        self._step_counts[env_indices] += 1
        # Copies: JAX may read the memory of its arguments after the call returns.
        self._current = current = self._step(
            self._current, self._get_mask(env_indices), batch, self._ids.copy(), self._step_counts.copy()
        )
        columns = current.reward, current.terminated, current.success, current.truncated
        return SimSteps(*map(np.asarray, columns)).select(env_indices)

    def _get_mask(self, env_indices: IntArray) -> np.ndarray:
        mask = np.zeros(len(self._ids), np.bool_)
        mask[env_indices] = True
        return mask

    def observe(self, env_indices: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observations of the environments into rows of `state`; there are no images."""
        state[rows] = np.asarray(self._current.obs)[env_indices]

    def save(self, env_index: int) -> Any:
        """Return a copy of the environment's state, its reset id, and its number of steps."""
        part = jax.tree.map(lambda array: np.array(array[env_index]), self._current)
        return part, int(self._ids[env_index]), int(self._step_counts[env_index])

    def load(self, env_index: int, state: Any) -> None:
        """Restore a saved state of the environment's episode."""
        part, self._ids[env_index], self._step_counts[env_index] = state
        self._current = jax.tree.map(lambda array, value: array.at[env_index].set(value), self._current, part)


def _compile_functions(functions: Functions, discrete: bool) -> tuple[Any, Any, Any]:
    """Return compiled functions: a reset of the batch, and a reset and a step of the environments in a mask."""
    reset_all = jax.vmap(lambda reset_id: functions.reset(_derive_key(reset_id, 0)))

    def reset_masked(current: StepResult, mask: Array, reset_ids: Array) -> StepResult:
        return _select(mask, reset_all(reset_ids), current)

    def step_one(carry: Any, action: Array, reset_id: Array, time: Array) -> StepResult:
        native_action = jnp.rint(action[0]).astype(jnp.int32) if discrete else action
        return functions.step(carry, native_action, _derive_key(reset_id, time))

    def step_masked(current: StepResult, mask: Array, actions: Array, reset_ids: Array, times: Array) -> StepResult:
        return _select(mask, jax.vmap(step_one)(current.carry, actions, reset_ids, times), current)

    return jax.jit(reset_all), jax.jit(reset_masked), jax.jit(step_masked)


def _select(mask: Array, new: StepResult, old: StepResult) -> StepResult:
    """Merge two batches: `new` where `mask` [N] is True, else `old`."""

    def select(new: Array, old: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(select, new, old)


def _derive_key(reset_id: Array, time: Array | int) -> Array:
    """Return the random key of step `time` of the episode with reset id `reset_id`; step 0 is the reset."""
    return jax.random.fold_in(jax.random.PRNGKey(reset_id), time)
