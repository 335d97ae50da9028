"""Gymnasium vector environments as simulators whose environments step together."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from embodyrl.envs.gym.api import require_step, to_bool_array
from embodyrl.envs.gym.episode_info import read_success
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.sims import GymSimulators, Probe
from embodyrl.envs.gym.spaces import copy_observation
from embodyrl.envs.simulators import SimSteps
from embodyrl.errors import ConfigError, EnvError, format_error
from embodyrl.types import BoolArray, ByteArray, FloatArray, IntArray, ObservationOut

log = logging.getLogger(__name__)


class VectorSims(GymSimulators):
    """Simulators of one vector environment, whose environments step together.

    The reset option `reset_mask` starts episodes in single environments. After an automatic reset, the observation of
    an environment is the final observation of the ended episode.
    """

    def __init__(self, cfg: GymSettings, probe: Probe, create: Callable[[int], Any], num_envs: int) -> None:
        super().__init__(cfg, probe)
        self._vector = create(num_envs)
        self._mode = get_autoreset_mode(self._vector)
        self._space = probe.action_space
        self._batch_info: dict[str, Any] = {}
        self._ended_envs: set[int] = set()
        """Environments whose episodes ended in the last step."""
        self._actions = [self._convert_action(np.zeros(self.spec.action.dim, np.float32))] * num_envs
        # Reset all environments, because environments without an episode are stepped, too.
        self._store(self._vector.reset(seed=[0] * num_envs)[0], range(num_envs))

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Reset the given environments, with the reset ids as seeds."""
        starts = dict(zip(env_indices.tolist(), reset_ids.tolist(), strict=True))
        self._ended_envs -= starts.keys()
        observations, infos = self._reset_masked(starts)
        self._store(observations, starts)
        success = self._get_success(infos)
        for env_index in starts:
            self._read_instruction(env_index, get_env_info(infos, env_index, len(self._actions)))
            self.record_solved_start(env_index, solved=bool(success[env_index]))

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        """Step the whole batch; environments without an action repeat their last action."""
        active_envs = env_indices.tolist()
        for env_index, action in zip(active_envs, actions, strict=True):
            self._actions[env_index] = self._convert_action(action)
        if self._ended_envs and self._mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            # The vector environment rejects steps after the end of an episode. Reset only here, because the final
            # observation is read before this step.
            self._reset_masked(dict.fromkeys(self._ended_envs, 0))
        # A vector environment takes one batch of its action space, which need not be an array.
        batch = concatenate(self._space, self._actions, create_empty_array(self._space, len(self._actions)))
        result = require_step(self.spec.name, self._vector.step(batch))
        observations, reward, terminated, truncated, infos = result
        name, count = self.spec.name, len(self._actions)
        terminated, truncated = (
            to_bool_array(name, "terminated", terminated, count),
            to_bool_array(name, "truncated", truncated, count),
        )
        self._ended_envs = {*np.flatnonzero(terminated | truncated).tolist()}
        success = self._get_success(infos)
        self._batch_info = infos
        self._store(observations, active_envs)
        if self._ended_envs and self._mode is AutoresetMode.SAME_STEP:
            success = self._restore_final_observations(
                infos, [env_index for env_index in self._ended_envs if env_index in active_envs], success
            )
        return SimSteps(np.asarray(reward, np.float64), terminated, success, truncated).select(env_indices)

    def observe(self, env_indices: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the latest observation of each environment into `images` and `state`."""
        for env_index, row in zip(env_indices.tolist(), rows.tolist(), strict=True):
            self._writer.write(self._observations[env_index], ObservationOut(images=images[row], state=state[row]))

    def _restore_final_observations(self, infos: dict[str, Any], ended_envs: list[int], success: Any) -> Any:
        """Store the final observations of ended episodes; return `success` [N] with their final values."""
        final_observations, final_infos = infos.get("final_obs"), infos.get("final_info", {})
        if final_observations is None:
            raise EnvError(
                f"env '{self.spec.name}' resets in the step in which an episode ends, without info['final_obs'], so "
                "the final observation is lost. Fix: set autoreset_mode=AutoresetMode.DISABLED or NEXT_STEP."
            )
        success = success.copy()
        for env_index in ended_envs:
            self._observations[env_index] = copy_observation(
                self._vector.single_observation_space, _select(final_observations, env_index)
            )
            success[env_index] = self._get_success(final_infos)[env_index]
        return success

    def _get_success(self, infos: Mapping[str, Any]) -> BoolArray:
        """Return a mask [N] of the environments whose `info` reports success."""
        success = read_success(infos, self._success_keys)
        if isinstance(success, np.ndarray) and success.dtype == object:  # None: not set for this environment
            success = np.asarray([False if value is None else value for value in success])
        return to_bool_array(self.spec.name, "success in info", success, len(self._actions))

    def info(self, env_index: int) -> dict[str, Any]:
        """Return the `info` of one environment, without keys that are not set for the environment."""
        infos = self._batch_info
        if env_index in self._ended_envs and self._mode is AutoresetMode.SAME_STEP:
            infos = infos.get("final_info", {})  # the other values belong to the next episode
        return get_env_info(infos, env_index, len(self._actions))

    def close(self) -> None:
        """Close the vector environment; idempotent.

        An error of the environment's `close` is only logged, because the results are complete.
        """
        try:
            if not self._vector.closed:
                self._vector.close()
        except Exception as error:
            log.warning("close() of env '%s' failed: %s", self.spec.name, format_error(error))

    def _render_frame(self, env_index: int) -> Any:
        return self._vector.render()[env_index] if self._vector.render_mode == "rgb_array" else None

    def _reset_masked(self, seeds: Mapping[int, int]) -> tuple[Any, dict[str, Any]]:
        """Reset the environments in `seeds`; return observation and info of the whole batch."""
        mask = np.zeros(len(self._actions), np.bool_)
        mask[list(seeds)] = True
        env_seeds = [seeds.get(env_index, 0) for env_index in range(len(mask))]
        return self._vector.reset(seed=env_seeds, options={"reset_mask": mask})

    def _store(self, batch: Any, env_indices: Iterable[int]) -> None:
        """Store a copy of the observation of each given environment."""
        items = list(iterate(self._vector.observation_space, batch))
        self._observations.update({env_index: copy.deepcopy(items[env_index]) for env_index in env_indices})


def _select(batch: Any, env_index: int) -> Any:
    """Select one environment's element of a batched value, recursively in dictionaries."""
    return (
        {name: _select(part, env_index) for name, part in batch.items()}
        if isinstance(batch, dict)
        else batch[env_index]
    )


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


def get_env_info(infos: dict[str, Any], env_index: int, count: int) -> dict[str, Any]:
    """Return the `info` of one environment of a batch, without keys that are not set for this environment."""
    return {
        name: _get_info_value(value, env_index, count)
        for name, value in infos.items()
        if not str(name).startswith("_") and np.broadcast_to(infos.get(f"_{name}", True), count)[env_index]
    }


def _get_info_value(value: Any, env_index: int, count: int) -> Any:
    if isinstance(value, dict):
        return get_env_info(value, env_index, count)
    is_batched = isinstance(value, (np.ndarray, list, tuple)) and len(value) == count
    return value[env_index] if is_batched else value
