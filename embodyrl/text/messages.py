"""Conversations of text tasks: messages, and their encoding as one string."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Author of the message: system, user, assistant or tool."""
    content: str


IMAGE_PLACEHOLDER = "<image>"
"""Placeholder of an image in the text of a message, as used in data sets."""
_TURN, _ROLE = "\x1e", "\x1f"
MARK = "\x1d"
"""Delimiter before and after each image size in the text of a message."""
_SEPARATOR_REMOVAL = dict.fromkeys(map(ord, _TURN + _ROLE))


def join_messages(messages: Sequence[Message]) -> str:
    """Join a conversation into one instruction, which `split_messages` parses.

    Turn separators are removed from the content, because otherwise a model could write user turns or tool answers.
    """
    return "".join(f"{_TURN}{m.role}{_ROLE}{m.content.translate(_SEPARATOR_REMOVAL)}" for m in messages)


def split_messages(instruction: str) -> tuple[Message, ...]:
    """Parse the result of `join_messages`; any other instruction becomes one user message."""
    if not instruction.startswith(_TURN):
        return (Message(role="user", content=instruction),)
    turns = (turn.partition(_ROLE) for turn in instruction.split(_TURN)[1:])
    return tuple(Message(role=role, content=content) for role, _, content in turns)


def split_images(content: str) -> list[str | tuple[int, int]]:
    """Split a message into alternating texts and image sizes (height, width); the first and last parts are texts."""
    parts = re.split(f"{MARK}([0-9]+x[0-9]+){MARK}", content)
    return [part if i % 2 == 0 else (int(part.split("x")[0]), int(part.split("x")[1])) for i, part in enumerate(parts)]


def remove_image_sizes(text: str) -> str:
    """Remove the delimiters of image sizes from a text that contains no images, such as a reply or a tool's answer."""
    return text.replace(MARK, "")


def restore_image_placeholders(content: str) -> str:
    """Return the text of a message, with `<image>` in place of each encoded image size."""
    return "".join(part if isinstance(part, str) else IMAGE_PLACEHOLDER for part in split_images(content))
