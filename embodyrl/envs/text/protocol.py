"""Interfaces of the replies of a text environment and of their rewards."""

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
    """Length of the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Reward of one answer."""

    reward: float
    success: bool
    components: tuple[float, ...]
    """Components in the order of `RewardJudge.components`."""
    problem: str | None = None
    """Error, if the reward is unknown."""
