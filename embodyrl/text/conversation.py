"""Rows of text tasks: messages in columns, prompt templates and image placeholders."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

from embodyrl.errors import ConfigError
from embodyrl.text.messages import IMAGE_PLACEHOLDER, MARK, Message, join_messages, remove_image_sizes
from embodyrl.text.settings import PairSettings, RowSettings

_TEXT_TYPES = ("text", "input_text")
"""Types of the parts of a message that contain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """One row of a text data set: the prompt messages and the reference answer."""

    messages: tuple[Message, ...]
    reference: str
    rejected: str | None = None
    """Rejected answer of a preference pair; `reference` is the chosen answer."""
    pictures: tuple[Any, ...] = ()
    """Images, one for each <image> in the messages; without <image>, the images precede the first user message.

    An image is a file, the bytes of a file, or pixels [H, W, 3]. After reading, each image is a `LazyImage`."""
    group: str | None = None
    """Name of a group; consecutive rows of a group are not divided between training and validation."""


def build_row(question: str, reference: str, *, examples: Sequence[Message] = (), group: str | None = None) -> TextRow:
    """Return a row whose last message is a question of the user."""
    messages = (*examples, Message(role="user", content=question))
    return TextRow(messages=messages, reference=reference, group=group)


def place_images(messages: Sequence[Message], sizes: Sequence[tuple[int, int]]) -> tuple[Message, ...]:
    """Replace image placeholders in messages with the image sizes, in a format that `split_images` parses.

    Raises:
        ValueError: the number of placeholders differs from the number of images.
    """
    messages = [replace(m, content=remove_image_sizes(m.content)) for m in messages]
    if not sizes:
        return tuple(messages)
    num_placeholders = sum(m.content.count(IMAGE_PLACEHOLDER) for m in messages)
    if not num_placeholders:
        first = next((m for m in messages if m.role == "user"), messages[0])
        with_placeholders = replace(first, content=IMAGE_PLACEHOLDER * len(sizes) + first.content)
        messages, num_placeholders = [with_placeholders if m is first else m for m in messages], len(sizes)
    if num_placeholders != len(sizes):
        raise ValueError(
            f"there are {len(sizes)} images, but the messages contain {IMAGE_PLACEHOLDER} {num_placeholders} times"
        )
    remaining = iter(sizes)
    contents = (
        re.sub(IMAGE_PLACEHOLDER, lambda _: "{0}{1}x{2}{0}".format(MARK, *next(remaining)), m.content) for m in messages
    )
    return tuple(replace(m, content=content) for m, content in zip(messages, contents, strict=True))


def join_pair(better: str, worse: str) -> str:
    """Join two answers into one text, which `split_messages` parses as two replies."""
    return join_messages([Message(role="assistant", content=text) for text in (better, worse)])


def read_messages(value: Any, *, images: bool) -> tuple[Message, ...]:
    """Return the messages in a column: objects with `role` and `content`, which is text or a list of texts and images.

    Raises:
        ValueError: the value has another format, or a field that would be lost, such as `tool_calls`.
    """
    messages = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(m, Mapping) and re.fullmatch(r"\w[\w-]*", str(m.get("role") or "")) for m in messages):
        raise ValueError(f"{str(value)[:60]!r} is neither text nor a list of messages with role and content")
    parsed = []
    for number, message in enumerate(messages, start=1):
        content, unsupported = message.get("content"), _list_unknown_fields(message, "role", "content")
        if unsupported:
            raise ValueError(f"message {number} has the unsupported fields {', '.join(unsupported)}")
        if content is None:
            raise ValueError(f"the content of message {number} is empty (null)")
        parsed.append(Message(role=message["role"], content=_read_content(content, number, images)))
    if not parsed:
        raise ValueError("there are no messages")
    return tuple(parsed)


def _list_unknown_fields(value: Mapping[str, Any], *known: str) -> list[str]:
    """Return the names of unknown fields that contain a value; Parquet fills absent fields with null."""
    return [str(key) for key in value if key not in known and value[key] not in (None, False, "", [], {})]


def _read_content(content: Any, number: int, images: bool) -> str:
    if isinstance(content, str | int | float) and not isinstance(content, bool):
        return str(content)
    if not isinstance(content, list):
        raise ValueError(f"the content of message {number} is neither text nor a list of texts and images")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and not _list_unknown_fields(part, "type") and images:
            texts.append(IMAGE_PLACEHOLDER)
        elif (
            kind in _TEXT_TYPES and isinstance(part.get("text"), str) and not _list_unknown_fields(part, "type", "text")
        ):
            texts.append(part["text"])
        elif kind == "image":
            raise ValueError(f"message {number} contains an image; data.image_key names the column of the images")
        else:
            raise ValueError(f"message {number} contains the unsupported part {str(part)[:60]}")
    return "".join(texts)


def complete_messages(messages: Sequence[Message], cfg: RowSettings) -> tuple[Message, ...]:
    """Return a prompt with the template applied to the last user message, after the system prompt.

    Raises:
        ValueError: the prompt has another system message, ends with a reply, or has no user message for the template.
    """
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if cfg.system_prompt is not None and any(m.role in ("system", "developer") for m in messages):
        raise ValueError("there is a system message in addition to data.system_prompt; set data.system_prompt=null")
    if messages[-1].role == "assistant":
        raise ValueError("the last message is an assistant message, which replies cannot continue; remove this message")
    if all(m.role == "system" for m in messages):
        raise ValueError("there is only a system message; add a user message")
    if cfg.prompt_template != "{prompt}" and not users:
        raise ValueError(
            "data.prompt_template needs a user message; add one, or set 'data.prompt_template=\"{prompt}\"'"
        )
    system = () if cfg.system_prompt is None else (Message(role="system", content=cfg.system_prompt),)
    last = users[-1] if users else None
    return system + tuple(
        replace(m, content=cfg.prompt_template.replace("{prompt}", m.content)) if i == last else m
        for i, m in enumerate(messages)
    )


def is_conversation(value: Any) -> bool:
    """Return True if an answer is a list of messages, whose last message is the answer."""
    return isinstance(value, list) and bool(value) and isinstance(value[-1], Mapping) and "content" in value[-1]


def read_answer(value: Any, prompt: Sequence[Message]) -> str:
    """Return an answer as text: a string, the last message of a conversation, or any other value as JSON.

    Raises:
        ValueError: a message would be lost, the conversation differs from the prompt, or JSON cannot encode the value.
    """
    if not is_conversation(value):
        try:
            return value if isinstance(value, str) else json.dumps(value)
        except TypeError as error:
            if isinstance(value, Number):  # of NumPy, or decimal
                return str(value)
            raise ValueError(f"a value is neither text nor JSON ({error}); convert the column to text") from error
    *earlier, answer = read_messages(value, images=False)
    expected = [(m.role, m.content.strip()) for m in prompt]
    actual = [(m.role, m.content.strip()) for m in earlier]
    if answer.role != "assistant" or (
        actual and actual not in (expected, [turn for turn in expected if turn[0] != "system"])
    ):
        raise ValueError("the conversation must be the messages of the prompt, followed by one assistant message")
    return answer.content


def get_column_value(raw: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field of a column: a.b is field b of column a."""
    if key in raw or "." not in key:
        return raw.get(key)
    head, _, rest = key.partition(".")
    inner = raw.get(head)
    return get_column_value(inner, rest) if isinstance(inner, Mapping) else None


def _as_user_message(prompt: str) -> tuple[Message, ...]:
    """Return a text as the message of the user.

    Raises:
        ValueError: the text is a list of messages in JSON, which the model would read as text.
    """
    if re.match(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""", prompt):
        raise ValueError("the messages are written as text; write a list of objects instead")
    return (Message(role="user", content=prompt),)


def read_texts(raw: Mapping[str, Any], cfg: RowSettings, where: str) -> TextRow:
    """Return the prompt, the answer and the rejected answer in the columns of a row.

    Raises:
        ConfigError: the row cannot be read without loss.
    """
    for key in {"tools", "chat_template_kwargs"} & raw.keys():
        if raw[key] and key not in (cfg.prompt_key, cfg.answer_key):
            raise ConfigError(
                f"{where}: column '{key}' is not supported. Set env.tools, or rename or remove the column."
            )
    key, prompt = cfg.prompt_key, get_column_value(raw, cfg.prompt_key)
    try:
        if isinstance(prompt, str):
            messages = _as_user_message(prompt)
        else:
            messages = read_messages(prompt, images=cfg.image_key is not None)
        key = cfg.answer_key
        reference, rejected = read_answer(get_column_value(raw, key), messages), None
        if isinstance(cfg, PairSettings):
            key = cfg.rejected_key
            rejected = read_answer(get_column_value(raw, key), messages)
    except ValueError as error:
        raise ConfigError(
            f"{where}, column '{key}': {error}. Correct the row, or select other columns (data.prompt_key, "
            "data.answer_key)."
        ) from error
    return TextRow(messages=messages, reference=reference, rejected=rejected)
