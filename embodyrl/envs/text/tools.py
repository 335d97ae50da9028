"""Tools that a reply may call, and how calls are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from embodyrl.registry import Registry

Tool = Callable[[str], str]
"""Takes the call's text and returns the answer; a ValueError becomes an answer that says what is wrong."""

TOOLS: Registry[Tool] = Registry("tool", group="embodyrl.tools")
TOOLS.add("calculator", "embodyrl.sandbox:calculate")
TOOLS.add("python", "embodyrl.sandbox:python_tool")


def find_call(reply: str, tools: Sequence[str]) -> tuple[str, str] | None:
    """(tool, text) of the call that a reply makes, or None.

    `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as chat models are trained to write it (of the arguments,
    the first value is taken), or `?text`, which asks the first tool and suits a model of single characters.
    """
    if tools and reply.startswith("?"):
        return tools[0], reply[1:].strip()
    tagged = re.search(r"<tool_call>(.*?)</tool_call>", reply, re.DOTALL)
    if tagged is None:
        return None
    try:
        call = json.loads(tagged[1])
        arguments = call["arguments"]
        text = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments
        return str(call["name"]), str(text)
    except (ValueError, KeyError, TypeError, StopIteration):
        return "", tagged[1]


def answer(call: tuple[str, str], tools: Sequence[str]) -> str:
    """Carry out a call; whatever the model got wrong is the answer."""
    name, text = call
    if name not in tools:
        return f"error: no tool '{name}'; there are {', '.join(tools)}"
    try:
        return TOOLS.get(name)(text)
    except ValueError as error:
        return f"error: {error}"
