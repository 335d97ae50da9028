"""Wrapper for simulators: observation history, and temporal ensembling of overlapping action chunks."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.envs.settings import RewardSettings
from embodyrl.envs.simulators import SimSteps, Simulators
from embodyrl.errors import ConfigError
from embodyrl.types import ActionKind, ByteArray, EnvSpec, ExpertSpec, FloatArray, IntArray


def with_history(env: EnvSpec, steps: int) -> EnvSpec:
    """Return the spec with states and cameras of several steps, oldest first; `front_1` is `front` one step earlier.

    Goals in a history of several steps cannot be relabeled.
    """
    if steps == 1:
        return env
    names = env.cameras.names
    earlier_names = tuple(f"{name}_{offset}" for offset in range(steps - 1, 0, -1) for name in names)
    cameras = replace(env.cameras, names=(*earlier_names, *names))
    return replace(env, cameras=cameras, state_dim=steps * env.state_dim, goal=None, history=steps * env.history)


def with_chunks(env: EnvSpec, chunk: int | None) -> EnvSpec:
    """Return the spec with a flattened chunk as one action, and without a scripted expert; None: return `env`.

    Raises:
        ConfigError: actions are categories, which have no average.
    """
    if chunk is None:
        return env
    if env.action.kind is not ActionKind.box:
        raise ConfigError(
            f"env.ensemble_chunk={chunk} averages real-valued actions, but the actions of env '{env.name}' are "
            "categories. Remove the key."
        )
    action, gripper = env.action, env.action.gripper
    # The environment itself rounds the gripper of executed actions to open or closed.
    gripper = None if gripper is None else replace(gripper, binary=False)
    # A person chooses single actions, not chunks.
    chunked = replace(
        action, dim=chunk * action.dim, low=action.low * chunk, high=action.high * chunk, gripper=gripper, controls=()
    )
    return replace(env, action=chunked, expert=ExpertSpec())


class TemporalEnsemble:
    """Running average of the actions that overlapping chunks predict for a step (ACT, arXiv 2304.13705, algorithm 2).

    The weight of the i-th chunk for a step is exp(-coeff i), i = 0 for the oldest.
    """

    def __init__(self, coeff: float, chunk: int) -> None:
        self._weights = np.exp(-coeff * np.arange(chunk)).astype(np.float32)
        self._weight_sums = np.cumsum(self._weights, dtype=np.float32)
        self._mean = np.zeros((0, 0), np.float32)
        self._count = np.zeros(0, np.int64)

    def add_chunk(self, chunk: FloatArray) -> FloatArray:
        """Add a chunk [H, A] for the current observation and return the action [A] of the current step."""
        if len(self._mean):
            count, overlap = self._count[:, None], chunk[: len(self._mean)]
            self._mean = (
                self._mean * self._weight_sums[count - 1] + overlap * self._weights[count]
            ) / self._weight_sums[count]
            self._count = np.minimum(self._count + 1, len(chunk))
        new = chunk[len(self._mean) :]
        mean = np.concatenate([self._mean, new]) if len(self._mean) else new
        count = np.concatenate([self._count, np.ones(len(new), np.int64)])
        self._mean, self._count = mean[1:], count[1:]
        return mean[0]


class HistorySims(Simulators):
    """Simulators with an observation history and temporal ensembling in each environment."""

    def __init__(self, inner: Simulators, cfg: RewardSettings) -> None:
        super().__init__(with_chunks(with_history(inner.spec, cfg.history), cfg.ensemble_chunk))
        self._inner, self._history, self._chunk = inner, cfg.history, cfg.ensemble_chunk
        self._coeff = cfg.ensemble_coeff
        self.task_limit, self.sequential, self.solved = inner.task_limit, inner.sequential, inner.solved
        self._observations: dict[int, list[tuple[ByteArray, FloatArray]]] = {}
        self._ensembles: dict[int, TemporalEnsemble] = {}

    @property
    def current_env(self) -> int | None:  # type: ignore[override]
        """Current environment of the wrapped simulators (see `Simulators.current_env`)."""
        return self._inner.current_env

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Reset the environments, and fill their histories with the first observation."""
        self._inner.reset(env_indices, reset_ids, seeds)
        for env_index in env_indices.tolist():
            self._observations.pop(env_index, None)
            if self._chunk is not None:
                self._ensembles[env_index] = TemporalEnsemble(self._coeff, self._chunk)
        self._append_observations(env_indices)

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        """Execute one action per environment.

        `actions` are [n, A] or, with temporal ensembling, [n, H*A]: chunks of H actions, which are averaged.
        """
        if self._chunk is not None:
            chunks = actions.reshape(len(env_indices), self._chunk, -1)
            pairs = zip(env_indices.tolist(), chunks, strict=True)
            actions = np.stack([self._ensembles[env_index].add_chunk(chunk) for env_index, chunk in pairs])
        result = self._inner.step(env_indices, actions)
        self._append_observations(env_indices)
        return result

    def observe(self, env_indices: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observation history of each environment, oldest first."""
        if self._history == 1:
            self._inner.observe(env_indices, images, state, rows)
            return
        for env_index, row in zip(env_indices.tolist(), rows.tolist(), strict=True):
            images[row] = np.concatenate([step_images for step_images, _ in self._observations[env_index]])
            state[row] = np.concatenate([step_state for _, step_state in self._observations[env_index]])

    def _append_observations(self, env_indices: IntArray) -> None:
        """Append the current observations of the environments to their histories."""
        if self._history == 1:
            return
        spec = self._inner.spec
        images = np.zeros((len(env_indices), len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
        state = np.zeros((len(env_indices), spec.state_dim), np.float32)
        self._inner.observe(env_indices, images, state, np.arange(len(env_indices)))
        for env_index, env_images, env_state in zip(env_indices.tolist(), images, state, strict=True):
            history = self._observations.get(env_index) or [(env_images, env_state)] * self._history
            self._observations[env_index] = [*history[1:], (env_images, env_state)]

    def render(self, env_index: int) -> ByteArray:
        """Return a frame of an environment (see `Simulators.render`)."""
        return self._inner.render(env_index)

    def info(self, env_index: int) -> Mapping[str, Any]:
        """Return the simulator's info of the last step."""
        return self._inner.info(env_index)

    def instruction(self, env_index: int) -> str | None:
        """Return the instruction of the environment's episode (see `Simulators.instruction`)."""
        return self._inner.instruction(env_index)

    def expert(self, env_index: int) -> FloatArray:
        """Return the scripted expert's next action [A]."""
        return self._inner.expert(env_index)

    def save(self, env_index: int) -> Any:
        """Return a copy of the environment's state, its observation history, and its running average of chunks."""
        return (
            self._inner.save(env_index),
            [*self._observations.get(env_index, ())],
            copy.deepcopy(self._ensembles.get(env_index)),
        )

    def load(self, env_index: int, state: Any) -> None:
        """Restore a saved state of the environment's episode, with its history and its running average of chunks."""
        inner, observations, ensemble = state
        self._inner.load(env_index, inner)
        self._observations[env_index] = [*observations]
        if ensemble is not None:
            self._ensembles[env_index] = copy.deepcopy(ensemble)

    def close(self) -> None:
        """Free the simulators; idempotent."""
        self._inner.close()
