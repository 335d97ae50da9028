"""Records of text tasks: messages, references and rewards."""

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
    """One text task: prompt and reference."""

    messages: tuple[Message, ...]
    reference: str
    rejected: str | None = None
    """The worse answer of a preference pair; `reference` is the better one."""
    pictures: tuple[Any, ...] = ()
    """One for each <image> in the messages (without any: before the user's first): files, their bytes or pixels [H, W,
    3]; rows that were read contain `Picture`."""


PICTURE = "<image>"
"""Placeholder of an image in a message, as in data sets."""
_TURN, _ROLE, _MARK = "\x1e", "\x1f", "\x1d"
_NO_TURNS = dict.fromkeys(map(ord, _TURN + _ROLE))


def join_messages(messages: Sequence[Message]) -> str:
    """Join a conversation into one instruction, which `split_messages` parses.

    Separators of turns are removed from the content: otherwise a model could write user turns or tool answers.
    """
    return "".join(f"{_TURN}{m.role}{_ROLE}{m.content.translate(_NO_TURNS)}" for m in messages)


def split_messages(instruction: str) -> tuple[Message, ...]:
    """Parse a conversation; any other instruction is one user message."""
    if not instruction.startswith(_TURN):
        return (Message(role="user", content=instruction),)
    turns = (turn.partition(_ROLE) for turn in instruction.split(_TURN)[1:])
    return tuple(Message(role=role, content=content) for role, _, content in turns)


def place_pictures(messages: Sequence[Message], sizes: Sequence[tuple[int, int]]) -> tuple[Message, ...]:
    """Replace image placeholders by image sizes, which `split_pictures` parses.

    Raises:
        ValueError: the messages have another number of images.
    """
    if not sizes:
        return tuple(messages)
    named = sum(m.content.count(PICTURE) for m in messages)
    if not named:
        first = next((m for m in messages if m.role == "user"), messages[0])
        front = replace(first, content=PICTURE * len(sizes) + first.content)
        messages, named = [front if m is first else m for m in messages], len(sizes)
    if named != len(sizes):
        raise ValueError(f"{len(sizes)} images, but the messages contain {PICTURE} {named} times")
    left = iter(sizes)
    marked = (re.sub(PICTURE, lambda _: "{0}{1}x{2}{0}".format(_MARK, *next(left)), m.content) for m in messages)
    return tuple(replace(m, content=content) for m, content in zip(messages, marked, strict=True))


def split_pictures(content: str) -> list[str | tuple[int, int]]:
    """Split a message into texts and image sizes (height, width), alternating; the first and last are texts."""
    parts = re.split(f"{_MARK}([0-9]+x[0-9]+){_MARK}", content)
    return [part if i % 2 == 0 else (int(part.split("x")[0]), int(part.split("x")[1])) for i, part in enumerate(parts)]


def spoken(content: str) -> str:
    """Return a message with `<image>` for each image."""
    return "".join(part if isinstance(part, str) else PICTURE for part in split_pictures(content))


def final_answer(reply: str) -> str:
    """Return the final answer of a reply: its last box, answer tag, letter after 'answer', or number, in that order."""
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
    """Join two answers into one text, which `split_messages` parses as two replies."""
    return join_messages([Message(role="assistant", content=text) for text in (better, worse)])
