"""Data classes for the reward functions of text environments."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished conversation to be rewarded."""

    prompt: str
    """The user's first message."""
    response: str
    """The last reply."""
    reference: str
    tokens: int
    """Number of tokens of the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Reward of one answer."""

    reward: float
    success: bool
    components: tuple[float, ...]
    """Reward components in the order of `RewardJudge.components`."""
    problem: str | None = None
    """Error message if the reward could not be computed, else None."""
