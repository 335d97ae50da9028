"""Gymnasium vector environments as simulators whose slots step together."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from embodyrl.envs.gym.api import require_step, to_bool_array
from embodyrl.envs.gym.episode_info import read_success
from embodyrl.envs.gym.properties import Probe
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.sims import GymSimulators
from embodyrl.envs.gym.spaces import copy_observation
from embodyrl.envs.simulators import SimSteps
from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import BoolArray, ByteArray, EnvSpec, FloatArray, IntArray, ObservationOut


class VectorSims(GymSimulators):
    """Simulators whose slots are the environments of one vector environment; all slots step together.

    Episodes start with `reset_mask`. After an automatic reset, the final observation is restored for the ended episode.
    """

    def __init__(
        self, cfg: GymSettings, spec: EnvSpec, probe: Probe, create: Callable[[int], Any], num_slots: int
    ) -> None:
        super().__init__(cfg, spec, probe)
        self._vector = create(num_slots)
        self._mode = get_autoreset_mode(self._vector)
        self._space = probe.action_space
        self._batch_info: dict[str, Any] = {}
        self._ended_slots: set[int] = set()
        """Slots whose episodes ended in the last step."""
        self._actions = [self._convert_action(np.zeros(spec.action.dim, np.float32))] * num_slots
        # All slots: slots without an episode are stepped with the others.
        self._store(self._vector.reset(seed=[0] * num_slots)[0], range(num_slots))

    def reset(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Reset the environments of the given slots, with the reset ids as seeds."""
        starts = dict(zip(slots.tolist(), reset_ids.tolist(), strict=True))
        self._ended_slots -= starts.keys()
        observations, infos = self._restart(starts)
        self._store(observations, starts)
        success = self._get_success(infos)
        for slot in starts:
            self._read_instruction(slot, get_slot_info(infos, slot, len(self._actions)))
            self.note_start(slot, solved=bool(success[slot]))

    def step(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Step the whole batch; slots without an action repeat their last action."""
        active_slots = slots.tolist()
        for slot, action in zip(active_slots, actions, strict=True):
            self._actions[slot] = self._convert_action(action)
        if self._ended_slots and self._mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            # The batch rejects steps after the end of an episode. Reset here, not earlier: the final observation is
            # read first.
            self._restart(dict.fromkeys(self._ended_slots, 0))
        # A vector environment takes one batch of its action space, which need not be an array.
        batch = concatenate(self._space, self._actions, create_empty_array(self._space, len(self._actions)))
        result = require_step(self.spec.name, self._vector.step(batch))
        observations, reward, terminated, truncated, infos = result
        name, count = self.spec.name, len(self._actions)
        terminated, truncated = (
            to_bool_array(name, "terminated", terminated, count),
            to_bool_array(name, "truncated", truncated, count),
        )
        self._ended_slots = {*np.flatnonzero(terminated | truncated).tolist()}
        success = self._get_success(infos)
        self._batch_info = infos
        self._store(observations, active_slots)
        if self._ended_slots and self._mode is AutoresetMode.SAME_STEP:
            success = self._restore_final_observations(
                infos, [slot for slot in self._ended_slots if slot in active_slots], success
            )
        return SimSteps(
            reward=np.asarray(reward, np.float64)[slots],
            terminated=terminated[slots],
            success=success[slots],
            truncated=truncated[slots],
        )

    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the latest observation of each slot into `images` and `state`."""
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            self._writer.write(self._observations[slot], ObservationOut(images=images[row], state=state[row]))

    def _restore_final_observations(self, infos: dict[str, Any], ended_slots: list[int], success: Any) -> Any:
        """Store the final observations of slots whose episode ended; return `success` [N] with their final values."""
        final_observations, final_infos = infos.get("final_obs"), infos.get("final_info", {})
        if final_observations is None:
            raise EnvError(
                f"env '{self.spec.name}' resets in the step in which an episode ends, without info['final_obs'], so "
                "the final observation is lost. Fix: set autoreset_mode=AutoresetMode.DISABLED or NEXT_STEP."
            )
        success = success.copy()
        for slot in ended_slots:
            self._observations[slot] = copy_observation(
                self._vector.single_observation_space, _select(final_observations, slot)
            )
            success[slot] = self._get_success(final_infos)[slot]
        return success

    def _get_success(self, infos: Mapping[str, Any]) -> BoolArray:
        """Return a mask [N] of the environments whose `info` reports success."""
        success = read_success(infos, self._success_keys)
        if isinstance(success, np.ndarray) and success.dtype == object:  # None: not set for this environment
            success = np.asarray([False if value is None else value for value in success])
        return to_bool_array(self.spec.name, "success in info", success, len(self._actions))

    def info(self, slot: int) -> dict[str, Any]:
        """Return the `info` of one slot, without keys that are not set for the slot."""
        infos = self._batch_info
        if slot in self._ended_slots and self._mode is AutoresetMode.SAME_STEP:
            infos = infos.get("final_info", {})  # the rest belongs to the episode that the batch has started
        return get_slot_info(infos, slot, len(self._actions))

    def close(self) -> None:
        """Close the vector environment. Further calls have no effect."""
        if not self._vector.closed:
            self._vector.close()

    def _render_frame(self, slot: int) -> Any:
        return self._vector.render()[slot] if self._vector.render_mode == "rgb_array" else None

    def _restart(self, seeds: Mapping[int, int]) -> tuple[Any, dict[str, Any]]:
        """Reset the environments of the given slots; return observation and info of the whole batch."""
        mask = np.zeros(len(self._actions), np.bool_)
        mask[list(seeds)] = True
        slot_seeds = [seeds.get(slot, 0) for slot in range(len(mask))]
        return self._vector.reset(seed=slot_seeds, options={"reset_mask": mask})

    def _store(self, batch: Any, slots: Iterable[int]) -> None:
        """Store a copy of the observation of each given slot."""
        items = list(iterate(self._vector.observation_space, batch))
        self._observations.update({slot: copy.deepcopy(items[slot]) for slot in slots})


def _select(batch: Any, slot: int) -> Any:
    """Select one environment's element of a batched value, recursively in dictionaries."""
    return {name: _select(part, slot) for name, part in batch.items()} if isinstance(batch, dict) else batch[slot]


def get_autoreset_mode(env: Any) -> AutoresetMode | None:
    """Return the autoreset mode of a vector environment; None: unknown.

    Raises:
        ConfigError: the environment declares a mode that Gymnasium does not have.
    """
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return None if mode is None else AutoresetMode(mode)
    except ValueError:
        raise ConfigError(
            f"The vector environment declares autoreset_mode={mode!r:.40}. Set it to one of "
            f"{', '.join(option.value for option in AutoresetMode)}."
        ) from None


def get_slot_info(infos: dict[str, Any], slot: int, count: int) -> dict[str, Any]:
    """Return the `info` of one environment of a batch, without keys that are not set for this environment."""
    return {
        name: value[slot] if isinstance(value, (np.ndarray, list, tuple)) and len(value) == count else value
        for name, value in infos.items()
        if not str(name).startswith("_") and np.broadcast_to(infos.get(f"_{name}", True), count)[slot]
    }
