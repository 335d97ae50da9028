"""Simulators for JAX environments: one compiled call steps all slots of a batch."""

from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np

from embodyrl.envs.functional.functions import Array, Functions, StepResult
from embodyrl.envs.simulators import SimSteps, Simulators
from embodyrl.types import ActionKind, ByteArray, EnvSpec, FloatArray, IntArray


class FunctionalSims(Simulators):
    """Simulators of one batched JAX environment; slots that are not stepped keep their state.

    The reset id determines an episode's random key, from which the key of each step is derived. Observations on the
    CPU are read from JAX's memory without a copy, through DLPack.
    """

    def __init__(self, spec: EnvSpec, functions: Functions, num_slots: int) -> None:
        super().__init__(spec)
        self._discrete = spec.action.kind is ActionKind.discrete
        low, high = spec.action.bounds
        self._low, self._high = np.array(low, np.float32), np.array(high, np.float32)
        self._shape = num_slots, spec.action.dim
        self._ids = np.zeros(num_slots, np.uint32)
        self._times = np.zeros(num_slots, np.uint32)
        self._reset, self._step = _compiled(functions, self._discrete)
        self._now: StepResult = self._reset.all(self._ids.copy())

    def reset(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Start an episode in each of the slots; all other slots keep their state."""
        self._ids[slots], self._times[slots] = reset_ids, 0
        self._now = self._reset.some(self._now, self._chosen(slots), self._ids.copy())

    def step(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Execute one action in each of the slots, in one compiled call."""
        batch = np.zeros(self._shape, np.float32)
        batch[slots] = np.clip(actions, self._low, self._high)
        self._times[slots] += 1
        # Copies: JAX may read the memory of its arguments after the call returns.
        self._now = now = self._step(self._now, self._chosen(slots), batch, self._ids.copy(), self._times.copy())
        return SimSteps(
            reward=shared(now.reward)[slots],
            terminated=shared(now.terminated)[slots],
            success=shared(now.success)[slots],
            truncated=shared(now.truncated)[slots],
        )

    def _chosen(self, slots: IntArray) -> np.ndarray:
        chosen = np.zeros(len(self._ids), np.bool_)
        chosen[slots] = True
        return chosen

    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observations of the slots into rows of `state`; there are no images."""
        state[rows] = shared(self._now.obs)[slots]

    def save(self, slot: int) -> Any:
        """Return a copy of the slot's state, its reset id, and its number of steps."""
        part = jax.tree.map(lambda whole: np.array(whole[slot]), self._now)
        return part, int(self._ids[slot]), int(self._times[slot])

    def load(self, slot: int, state: Any) -> None:
        """Restore a saved state of the slot's episode."""
        part, self._ids[slot], self._times[slot] = state
        self._now = jax.tree.map(lambda whole, one: whole.at[slot].set(one), self._now, part)


def shared(array: Array) -> np.ndarray:
    """Return a JAX array as numpy: a view if the array is on the CPU and not boolean, otherwise a copy."""
    on_cpu = next(iter(array.devices())).platform == "cpu"
    if not on_cpu or array.dtype == jnp.bool_:  # older NumPy releases refuse flags through DLPack
        return np.asarray(array)
    return np.from_dlpack(array)


class _Resets:
    """Compiled reset functions: `all` resets the whole batch, `some` only the slots in a mask."""

    def __init__(self, functions: Functions) -> None:
        every = jax.vmap(lambda name: functions.reset(_key(name, 0)))

        def some(now: StepResult, chosen: Array, names: Array) -> StepResult:
            return _where(chosen, every(names), now)

        self.all, self.some = jax.jit(every), jax.jit(some)


def _compiled(functions: Functions, discrete: bool) -> tuple[_Resets, Any]:
    def one(carry: Any, action: Array, name: Array, time: Array) -> StepResult:
        chosen = jnp.rint(action[0]).astype(jnp.int32) if discrete else action
        return functions.step(carry, chosen, _key(name, time))

    def some(now: StepResult, chosen: Array, actions: Array, names: Array, times: Array) -> StepResult:
        return _where(chosen, jax.vmap(one)(now.carry, actions, names, times), now)

    return _Resets(functions), jax.jit(some)


def _where(chosen: Array, new: StepResult, old: StepResult) -> StepResult:
    """Merge two batches: `new` where `chosen` [N] is True, else `old`."""

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, new, old)


def _key(name: Array, time: Array | int) -> Array:
    """Return the random key of step `time` of the episode with reset id `name`; step 0 is the reset."""
    return jax.random.fold_in(jax.random.PRNGKey(name), time)
