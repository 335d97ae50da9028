"""What a reward is, and where rewards are found by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from embodyrl.registry import Registry


class Reward(Protocol):
    """A reward function; it may raise, which counts as 0 and is reported."""

    def __call__(self, prompt: str, response: str, reference: str) -> float | Mapping[str, float]:
        """Judge a response: one number, best within 0..1, or several by name, which are added."""
        ...


REWARDS: Registry[Reward] = Registry("reward", group="embodyrl.rewards")
