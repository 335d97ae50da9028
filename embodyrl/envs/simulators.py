"""What a simulator has to do to become an environment; `ChunkedEnv` does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodyrl.errors import EnvError
from embodyrl.types import BoolArray, ByteArray, EnvSpec, EpisodeStart, FloatArray, IntArray, ObservationOut


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """What a simulator says about one executed action."""

    reward: float
    """The simulator's own reward after this action, neither relative nor scaled."""
    terminated: bool
    """The task ended by itself (goal reached or failed); never the time limit."""
    success: bool
    """The task's goal holds after this action."""
    truncated: bool = False
    """The simulator itself cut the episode, by a time limit of its own for example; only where its spec says
    `may_truncate`."""


class Simulators:
    """What all simulators have in common."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec

    def render(self, slot: int) -> ByteArray:
        """Return an upright RGB frame [H, W, 3] uint8."""
        raise EnvError(f"env '{self.spec.name}' has no picture to record; set video=none.")

    def info(self, slot: int) -> Mapping[str, Any]:
        """What the simulator says about the last step beside `SimStep`, for reward functions."""
        return {}

    def close(self) -> None:
        """Free the simulators; idempotent."""
        return None


class SlotSimulators(Simulators, ABC):
    """N single-step simulators; `ChunkedEnv` turns them into an `Env`. Slots count from 0."""

    task_limit: int | None = None
    """See `Env.task_limit`."""

    @abstractmethod
    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Put the slot into initial state `reset_id`; `seed` fixes the simulator's own randomness."""

    @abstractmethod
    def step(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A]."""

    @abstractmethod
    def observe(self, slot: int, out: ObservationOut) -> None:
        """Write images and state of the slot into the views."""

    @abstractmethod
    def render(self, slot: int) -> ByteArray:
        """Return an upright RGB frame [H, W, 3] uint8."""

    def expert(self, slot: int) -> FloatArray:
        """Return the scripted expert's next action [A]; only called for tasks in `spec.expert_tasks`."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert.")


class BatchedSimulators(SlotSimulators):
    """`SlotSimulators` that begin and step together; their `reset` and `step` are never called."""

    @abstractmethod
    def begin(self, starts: Mapping[int, EpisodeStart]) -> None:
        """Begin an episode in each of these slots, in one go."""

    @abstractmethod
    def advance(self, actions: Mapping[int, FloatArray]) -> Mapping[int, SimStep]:
        """Execute one action [A] in each of these slots; what all others do meanwhile is nobody's concern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSteps:
    """`SimStep` of n slots, arrays [n]."""

    reward: FloatArray
    terminated: BoolArray
    success: BoolArray
    truncated: BoolArray


class ArraySimulators(Simulators, ABC):
    """N simulators of one kind whose state is arrays: one call begins, steps or observes many slots.

    `ArrayEnv` turns them into an `Env`. `slots` [n] are row numbers, each at most once; only these slots move.
    """

    @abstractmethod
    def begin(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Put the slots into initial states `reset_ids` [n]; `seeds` [n] fix all further randomness of each."""

    @abstractmethod
    def advance(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Execute one action [n, A] in each slot."""

    @abstractmethod
    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray) -> None:
        """Write what the slots show into `images` [n, C, H, W, 3] and `state` [n, S]."""
