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
    """`SimStep` of n slots, arrays [n]."""

    reward: DoubleArray | FloatArray
    terminated: BoolArray
    success: BoolArray
    truncated: BoolArray


class Simulators(ABC):
    """N simulator slots of one process, counted from 0. `slots` [n] are distinct slot numbers.

    A simulator that must step all its slots at once sets `EnvSpec.simulator.lockstep`: slots that are not in `slots`
    may then advance arbitrarily. Other simulators leave such slots unchanged.
    """

    task_limit: int | None = None
    """See `Env.task_limit`."""
    sequential: bool = False
    """Run the whole chunk of one slot before the chunk of the next slot, because switching slots is expensive."""
    current_slot: int | None = None
    """Current slot for error messages, if slots are processed one by one."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self.solved: set[int] = set()
        """Slots whose goal was reached when their episode began."""

    def note_start(self, slot: int, *, solved: bool) -> None:
        """Store in `solved` if the goal is already reached at the start of the slot's episode; called by `reset`."""
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
        """Return the instruction of the slot's episode; None: the spec's instruction for the reset id applies."""
        return None

    def expert(self, slot: int) -> FloatArray:
        """Return the scripted expert's next action [A]; called only for tasks in `spec.expert.tasks`."""
        raise EnvError(f"env '{self.spec.name}' has no scripted expert; choose another model.")

    def save(self, slot: int) -> Any:
        """Return a copy of the slot's state for `load`; called only if `spec.simulator.saves_state`."""
        raise EnvError(f"env '{self.spec.name}' cannot save its state.")

    def load(self, slot: int, state: Any) -> None:
        """Continue the slot's episode in a saved state of the same episode."""
        raise EnvError(f"env '{self.spec.name}' cannot load a state.")

    def close(self) -> None:
        """Free the simulators; idempotent."""
        return None


class PerSlot(Simulators):
    """Simulators with one instance (or one saved state) per slot: loops over the slots."""

    @abstractmethod
    def reset_slot(self, slot: int, reset_id: int, seed: int) -> None:
        """Set the slot to initial state `reset_id`; `seed` determines the randomness of the episode."""

    @abstractmethod
    def step_slot(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A]."""

    @abstractmethod
    def observe_slot(self, slot: int, out: ObservationOut) -> None:
        """Write images and state of the slot into the views."""

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
        ended, reached, cut = columns[1:].astype(np.bool_)
        return SimSteps(reward=columns[0], terminated=ended, success=reached, truncated=cut)

    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Observe the slots one by one, each directly into its row."""
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            self.current_slot = slot
            self.observe_slot(slot, ObservationOut(images=images[row], state=state[row]))
