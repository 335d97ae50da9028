"""Data classes for the reward functions of text environments."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Finished conversation, the input of a reward function."""

    prompt: str
    """Last message of the data row that is not a system message."""
    response: str
    """Last reply of the policy."""
    reference: str
    tokens: int
    """Number of tokens of the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Result of the reward function for one answer."""

    reward: float
    success: bool
    components: tuple[float, ...]
    """Reward components in the order of `RewardRunner.components`."""
    problem: str | None = None
    """Error message if the reward could not be computed, else None."""
