"""Interface of simulators: reset, step and observe by environment index. `ChunkedEnv` adds episodes and rewards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from embodyrl.errors import EnvError, NoImageError
from embodyrl.types import BoolArray, ByteArray, DoubleArray, EnvSpec, FloatArray, IntArray, ObservationOut


class SimStep(NamedTuple):
    """Result of one executed action in one environment."""

    reward: float
    """Reward of the simulator after this action, before `use_rel_reward` and `reward_coef`."""
    terminated: bool
    """True if the task ended (goal reached or failed); never set by the time limit."""
    success: bool
    """True if the goal is reached after this action."""
    truncated: bool = False
    """True if the simulator truncated the episode, for example by its own time limit; requires
    `EnvSpec.simulator.may_truncate`."""


class SimSteps(NamedTuple):
    """Results of one executed action in each of n environments (see `SimStep`); all arrays have shape [n]."""

    reward: DoubleArray | FloatArray
    terminated: BoolArray
    success: BoolArray
    truncated: BoolArray

    def select(self, env_indices: IntArray) -> Self:
        """Return the results of the environments `env_indices` of a batch."""
        return self._make(values[env_indices] for values in self)


class Simulators(ABC):
    """Base class of N parallel environments in one process. `env_indices` [n] are different indices in 0..N-1.

    A simulator that must step all its environments at once sets `EnvSpec.simulator.lockstep`: environments that are
    not in `env_indices` may then advance arbitrarily. Other simulators leave such environments unchanged.
    """

    task_limit: int | None = None
    """Maximum number of distinct tasks without reloading simulators (see `Env.task_limit`)."""
    sequential: bool = False
    """True if switching between environments is expensive: each executes its whole chunk before the next one starts."""
    current_env: int | None = None
    """Environment that is being processed, for error messages; None if environments are processed together."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self.solved: set[int] = set()
        """Environments whose goal was already reached at the start of the episode."""

    def record_solved_start(self, env_index: int, *, solved: bool) -> None:
        """Record in `solved` whether the goal is already reached at the start of the episode; called by `reset`."""
        (self.solved.add if solved else self.solved.discard)(env_index)

    @abstractmethod
    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Set the environments to initial states `reset_ids` [n]; `seeds` [n] seed the episodes."""

    @abstractmethod
    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        """Execute one action [n, A] in each environment."""

    @abstractmethod
    def observe(self, env_indices: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observation of `env_indices[i]` into `images[rows[i]]` [C, H, W, 3] and `state[rows[i]]` [S]."""

    def render(self, env_index: int) -> ByteArray:
        """Return an upright RGB frame [H, W, 3] uint8."""
        raise NoImageError(f"env '{self.spec.name}' has no image to record; set video=none.")

    def info(self, env_index: int) -> Mapping[str, Any]:
        """Return the simulator's info of the last step, for reward functions."""
        return {}

    def instruction(self, env_index: int) -> str | None:
        """Return the instruction of the environment's episode; None: `instruction_for` determines the instruction."""
        return None

    def expert(self, env_index: int) -> FloatArray:
        """Return the scripted expert's next action [A]; called only for tasks in `spec.expert.tasks`."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")

    def save(self, env_index: int) -> Any:
        """Return a copy of the environment's state for `load`; called only if `spec.simulator.saves_state`."""
        raise EnvError(f"env '{self.spec.name}' cannot save its state: its simulator class does not implement `save`.")

    def load(self, env_index: int, state: Any) -> None:
        """Restore a saved state of the environment's episode."""
        raise EnvError(f"env '{self.spec.name}' cannot restore a state: its simulator class does not implement `load`.")

    def close(self) -> None:
        """Free the simulators; idempotent."""
        return None


class SequentialSimulators(Simulators):
    """Base class of simulators that process one environment at a time."""

    @abstractmethod
    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        """Set the environment to initial state `reset_id`; `seed` determines the randomness of the episode."""

    @abstractmethod
    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        """Execute one action [A]."""

    @abstractmethod
    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        """Write the environment's images and state into the arrays of `out`."""

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Reset the environments one by one."""
        for env_index, reset_id, seed in zip(env_indices.tolist(), reset_ids.tolist(), seeds.tolist(), strict=True):
            self.current_env = env_index
            self.reset_env(env_index, reset_id, seed)

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        """Step the environments one by one."""
        rows: list[SimStep] = []
        for env_index, action in zip(env_indices.tolist(), actions, strict=True):
            self.current_env = env_index
            rows.append(self.step_env(env_index, action))
        reward, *flags = np.array(rows, np.float64).T
        return SimSteps(reward, *(flag.astype(np.bool_) for flag in flags))

    def observe(self, env_indices: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observations of the environments one by one."""
        for env_index, row in zip(env_indices.tolist(), rows.tolist(), strict=True):
            self.current_env = env_index
            self.observe_env(env_index, ObservationOut(images=images[row], state=state[row]))
