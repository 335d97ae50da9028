"""Interface of simulators: reset, step and observe on arrays of slots. `ChunkedEnv` adds episodes and rewards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.errors import EnvError, NoImageError
from embodyrl.types import BoolArray, ByteArray, DoubleArray, EnvSpec, FloatArray, IntArray, ObservationOut


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """Result of one executed action in one slot."""

    reward: float
    """Reward of the simulator after this action, before `use_rel_reward` and `reward_coef`."""
    terminated: bool
    """True if the task ended (goal reached or failed); never set by the time limit."""
    success: bool
    """True if the goal is reached after this action."""
    truncated: bool = False
    """True if the simulator truncated the episode, for example by its own time limit; requires
    `EnvSpec.simulator.may_truncate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSteps:
    """Results of one executed action in each of n slots (see `SimStep`); all arrays have shape [n]."""

    reward: DoubleArray | FloatArray
    terminated: BoolArray
    success: BoolArray
    truncated: BoolArray


class Simulators(ABC):
    """Base class of N simulators (slots) in one process. Arguments `slots` [n] are distinct slot numbers from 0.

    A simulator that must step all its slots at once sets `EnvSpec.simulator.lockstep`: slots that are not in `slots`
    may then advance arbitrarily. Other simulators leave such slots unchanged.
    """

    task_limit: int | None = None
    """Maximum number of distinct tasks without reloading simulators (see `Env.task_limit`)."""
    sequential: bool = False
    """If true, each slot executes its whole chunk before the next slot starts, because switching slots is expensive."""
    current_slot: int | None = None
    """Slot that is being processed, for error messages; None if slots are processed together."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self.solved: set[int] = set()
        """Slots whose goal was already reached at the start of the episode."""

    def note_start(self, slot: int, *, solved: bool) -> None:
        """Record in `solved` if the goal is already reached at the start of the slot's episode; called by `reset`."""
        (self.solved.add if solved else self.solved.discard)(slot)

    @abstractmethod
    def reset(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Set the slots to initial states `reset_ids` [n]; `seeds` [n] determine the randomness of each episode."""

    @abstractmethod
    def step(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Execute one action [n, A] in each slot."""

    @abstractmethod
    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observation of `slots[i]` into `images[rows[i]]` [C, H, W, 3] and `state[rows[i]]` [S]."""

    def render(self, slot: int) -> ByteArray:
        """Return an upright RGB frame [H, W, 3] uint8."""
        raise NoImageError(f"env '{self.spec.name}' has no image to record; set video=none.")

    def info(self, slot: int) -> Mapping[str, Any]:
        """Return the simulator's info of the last step, for reward functions."""
        return {}

    def instruction(self, slot: int) -> str | None:
        """Return the instruction of the slot's episode; None: `instruction_for` determines the instruction."""
        return None

    def expert(self, slot: int) -> FloatArray:
        """Return the scripted expert's next action [A]; called only for tasks in `spec.expert.tasks`."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")

    def save(self, slot: int) -> Any:
        """Return a copy of the slot's state for `load`; called only if `spec.simulator.saves_state`."""
        raise EnvError(f"env '{self.spec.name}' cannot save its state: its simulators have no method save.")

    def load(self, slot: int, state: Any) -> None:
        """Restore a saved state of the slot's episode."""
        raise EnvError(f"env '{self.spec.name}' cannot load a state: its simulators have no method load.")

    def close(self) -> None:
        """Free the simulators; idempotent."""
        return None


class PerSlot(Simulators):
    """Base class of simulators that process one slot at a time."""

    @abstractmethod
    def reset_slot(self, slot: int, reset_id: int, seed: int) -> None:
        """Set the slot to initial state `reset_id`; `seed` determines the randomness of the episode."""

    @abstractmethod
    def step_slot(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A]."""

    @abstractmethod
    def observe_slot(self, slot: int, out: ObservationOut) -> None:
        """Write the slot's images and state into the arrays of `out`."""

    def reset(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Reset the slots one by one."""
        for slot, reset_id, seed in zip(slots.tolist(), reset_ids.tolist(), seeds.tolist(), strict=True):
            self.current_slot = slot
            self.reset_slot(slot, reset_id, seed)

    def step(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Step the slots one by one."""
        rows: list[tuple[float, bool, bool, bool]] = []
        for slot, action in zip(slots.tolist(), actions, strict=True):
            self.current_slot = slot
            step = self.step_slot(slot, action)
            rows.append((step.reward, step.terminated, step.success, step.truncated))
        columns = np.array(rows, np.float64).T
        terminated, success, truncated = columns[1:].astype(np.bool_)
        return SimSteps(reward=columns[0], terminated=terminated, success=success, truncated=truncated)

    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the observations of the slots one by one."""
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            self.current_slot = slot
            self.observe_slot(slot, ObservationOut(images=images[row], state=state[row]))
