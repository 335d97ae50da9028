"""One demonstration in memory."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.types import BoolArray, ByteArray, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an episode came from; enough to run it again."""

    task_id: int
    reset_id: int
    trial: int
    """How-manieth planned episode of its task; demonstrations of a task are taken in this order."""
    seed: int
    """Seed of the simulator's own randomness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One episode of T env steps: what was seen before each action, the action, and what came of it."""

    images: ByteArray
    """[T, C, H, W, 3] uint8 in the simulator's orientation."""
    state: FloatArray
    """[T, S]"""
    action: FloatArray
    """[T, A] in the environment's units and gripper convention."""
    reward: FloatArray
    """[T]"""
    success: BoolArray
    """[T] the task's goal holds after this action."""
    instruction: str
    source: Source

    def __len__(self) -> int:
        return len(self.action)

    @property
    def image_bytes(self) -> int:
        return self.images.nbytes
