"""Records of text tasks: who said what, what it is judged by, and what it was worth."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """One task in words: what is asked, and what an answer is judged by."""

    messages: tuple[Message, ...]
    reference: str
    rejected: str | None = None
    """Of a pair of answers the worse one; `reference` is the better."""


_TURN, _ROLE = "\x1e", "\x1f"


def join_messages(messages: Sequence[Message]) -> str:
    """Write a conversation as one instruction; `split_messages` reads it back."""
    return "".join(f"{_TURN}{m.role}{_ROLE}{m.content}" for m in messages)


def split_messages(instruction: str) -> tuple[Message, ...]:
    """Read a conversation; any other instruction is one message of the user."""
    if not instruction.startswith(_TURN):
        return (Message(role="user", content=instruction),)
    turns = (turn.partition(_ROLE) for turn in instruction.split(_TURN)[1:])
    return tuple(Message(role=role, content=content) for role, _, content in turns)


def join_pair(better: str, worse: str) -> str:
    """Write two answers as one text; `split_messages` reads them back as two replies."""
    return join_messages([Message(role="assistant", content=text) for text in (better, worse)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished conversation that wants a reward."""

    prompt: str
    """What was asked: the user's first message."""
    response: str
    """The last reply."""
    reference: str
    tokens: int
    """Length of the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The worth of one answer."""

    reward: float
    success: bool
    components: tuple[float, ...]
    """In the order of `Judge.components`."""
    problem: str | None = None
    """Why there is no real reward."""
