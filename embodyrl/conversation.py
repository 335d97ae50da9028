"""Records of text tasks: who said what, what it is judged by, and what it was worth."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


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
    pictures: tuple[Any, ...] = ()
    """One for each <image> in the messages (without any: in front of the user's first): files, their bytes or pixels
    [H, W, 3]; rows that were read hold `datasets.text.Picture`."""


PICTURE = "<image>"
"""Where an image stands in a message, as data sets and people write it."""
_TURN, _ROLE, _MARK = "\x1e", "\x1f", "\x1d"
_NO_TURNS = dict.fromkeys(map(ord, _TURN + _ROLE))


def join_messages(messages: Sequence[Message]) -> str:
    """Write a conversation as one instruction; `split_messages` reads it back.

    Content loses what would begin a turn: a model could else speak for the user, or answer its own calls of tools.
    """
    return "".join(f"{_TURN}{m.role}{_ROLE}{m.content.translate(_NO_TURNS)}" for m in messages)


def split_messages(instruction: str) -> tuple[Message, ...]:
    """Read a conversation; any other instruction is one message of the user."""
    if not instruction.startswith(_TURN):
        return (Message(role="user", content=instruction),)
    turns = (turn.partition(_ROLE) for turn in instruction.split(_TURN)[1:])
    return tuple(Message(role=role, content=content) for role, _, content in turns)


def place_pictures(messages: Sequence[Message], sizes: Sequence[tuple[int, int]]) -> tuple[Message, ...]:
    """Say at each image's place how high and wide it is; `split_pictures` reads it back.

    Raises:
        ValueError: the messages name another number of images.
    """
    if not sizes:
        return tuple(messages)
    named = sum(m.content.count(PICTURE) for m in messages)
    if not named:
        first = next((m for m in messages if m.role == "user"), messages[0])
        front = replace(first, content=PICTURE * len(sizes) + first.content)
        messages, named = [front if m is first else m for m in messages], len(sizes)
    if named != len(sizes):
        raise ValueError(f"{len(sizes)} images, but {named} times {PICTURE} in the messages")
    left = iter(sizes)
    marked = (re.sub(PICTURE, lambda _: "{0}{1}x{2}{0}".format(_MARK, *next(left)), m.content) for m in messages)
    return tuple(replace(m, content=content) for m, content in zip(messages, marked, strict=True))


def split_pictures(content: str) -> list[str | tuple[int, int]]:
    """Texts and sizes of images (height, width) of a message, in turn; a text stands first and last."""
    parts = re.split(f"{_MARK}([0-9]+x[0-9]+){_MARK}", content)
    return [part if i % 2 == 0 else (int(part.split("x")[0]), int(part.split("x")[1])) for i, part in enumerate(parts)]


def spoken(content: str) -> str:
    """A message as people read it: `<image>` where an image stands."""
    return "".join(part if isinstance(part, str) else PICTURE for part in split_pictures(content))


def final_answer(reply: str) -> str:
    """What a reply comes to: its last box, answer tag, letter after 'answer', or number, whichever there is first."""
    for pattern in (
        r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}",
        r"#### (-?[0-9.,]*[0-9])",
        r"(?s)<answer>(.*?)</answer>",
        r"(?i:answer)(?:\s+is)?\s*:?\s*\(?([A-Z])\)?\s*(?:[.,;\n]|$)",
        r"-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:/\d+)?",
    ):
        if found := re.findall(pattern, reply):
            return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", found[-1].strip())  # 1,000 is 1000, but (1,2) is not 12
    return reply.strip()


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
