"""Rows of text tasks, and image placeholders in messages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodyrl.extensions.conversation import MARK, PICTURE, Message, join_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """One row of a text data set: the prompt messages and the reference answer."""

    messages: tuple[Message, ...]
    reference: str
    rejected: str | None = None
    """Rejected answer of a preference pair; `reference` is the chosen answer."""
    pictures: tuple[Any, ...] = ()
    """Images, one for each <image> in the messages; without <image>, the images precede the first user message.

    An image is a file, the bytes of a file, or pixels [H, W, 3]. After reading, each image is a `Picture`."""
    group: str | None = None
    """Name of a group; consecutive rows of a group are not divided between training and validation."""


def place_pictures(messages: Sequence[Message], sizes: Sequence[tuple[int, int]]) -> tuple[Message, ...]:
    """Replace image placeholders in messages with the image sizes, in a format that `split_pictures` parses.

    Raises:
        ValueError: the number of placeholders differs from the number of images.
    """
    if not sizes:
        return tuple(messages)
    named = sum(m.content.count(PICTURE) for m in messages)
    if not named:
        first = next((m for m in messages if m.role == "user"), messages[0])
        front = replace(first, content=PICTURE * len(sizes) + first.content)
        messages, named = [front if m is first else m for m in messages], len(sizes)
    if named != len(sizes):
        raise ValueError(f"there are {len(sizes)} images, but the messages contain {PICTURE} {named} times")
    left = iter(sizes)
    marked = (re.sub(PICTURE, lambda _: "{0}{1}x{2}{0}".format(MARK, *next(left)), m.content) for m in messages)
    return tuple(replace(m, content=content) for m, content in zip(messages, marked, strict=True))


def join_pair(better: str, worse: str) -> str:
    """Join two answers into one text, which `split_messages` parses as two replies."""
    return join_messages([Message(role="assistant", content=text) for text in (better, worse)])
