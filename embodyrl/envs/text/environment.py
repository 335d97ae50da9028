"""Conversations as episodes: each data row is an initial state, and each reply is an action chunk of token ids."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodyrl.envs.protocol import AfterStep
from embodyrl.envs.text.dialogue import ReplyEnv, create_reply_result, truncate_text
from embodyrl.envs.text.protocol import Answer
from embodyrl.envs.text.reward_runner import RewardRunner
from embodyrl.envs.text.settings import TextSettings
from embodyrl.registry import load, takes
from embodyrl.text.conversation import TextRow
from embodyrl.text.dataset import TextRows
from embodyrl.text.messages import Message, join_messages, remove_image_sizes, restore_image_placeholders
from embodyrl.types import (
    BoolArray,
    ByteArray,
    ChunkResult,
    EnvSpec,
    EpisodeStart,
    FloatArray,
    IntArray,
)

Tool = Callable[[str], str]
"""Function that takes the text of a tool call and returns the tool's answer. If the function raises a ValueError, the
error message is the answer. Answers longer than the function's attribute `answer_bytes` (default: `ANSWER_BYTES`) are
truncated."""

TOOLS = {
    "calculator": "embodyrl.text.sandbox:calculate",
    "python": "embodyrl.text.sandbox:python_tool",
}
"""Import paths of the built-in tools, by name."""


def find_tool(name: str) -> Tool:
    """Return the tool of a name or import path.

    Raises:
        UnknownNameError: there is no such tool.
    """
    return load(name, "tool", wants="a function of a text", fits=takes(1), names=TOOLS)


FINAL_REPLY_BYTES = 1 << 10
"""Bytes reserved for the final reply in the last observation; the reply is stored there only for display."""
TURN_BYTES = 1 << 12
"""Bytes reserved for the reply and the tool's answer of each turn after the first. A conversation that needs more bytes
ends."""
ANSWER_BYTES = 1 << 10
"""Default maximum size of a tool's answer in bytes; longer answers are truncated."""


Call = tuple[str, str]
"""Name and argument of a tool call, or an empty name and the reason why the call is malformed."""

MAX_CALLS = 8
"""Maximum number of tool calls in a reply. The total size of their answers is limited to that of one answer."""

_THOUGHT_PATTERN = re.compile(r"<think>.*?(?:</think>|$)|\[THINK\].*?(?:\[/THINK\]|$)", re.DOTALL)
# Linear time for any reply: no blanks next to `.*?`, and each search for an end stops at the next start.
_CALLS_PATTERN = re.compile(
    r"<tool_call>(?P<tagged>(?:(?!<tool_call>).)*?)(?P<end></tool_call>|(?=<tool_call>)|\Z)"
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>)(?P<marked>.*?)(?=\[TOOL_CALLS\]|\Z)"
    r"|(?P<function><function=(?:(?!<function=).)*?</function>)",
    re.DOTALL,
)
_ARGUMENTS_PATTERN = re.compile(r'"(?:arguments|parameters|function)"\s*:')
_FENCE_PATTERN = re.compile(r"```(?:json)?(.*?)```", re.DOTALL)
_FUNCTION_PATTERN = re.compile(r"<function=([^<>\s]+)>((?:(?!<function=).)*?)</function>", re.DOTALL)
_PARAMETER_PATTERN = re.compile(r"<parameter=([^<>\s]+)>((?:(?!<parameter=).)*?)</parameter>", re.DOTALL)
_NAMED_CALL_PATTERN = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\w*+)?\s*+(?:\[ARGS\])?\s*+(?=\{)")


def find_calls(reply: str, tools: Sequence[str]) -> list[Call] | None:
    """Return the tool calls in a reply, or None; text inside <think> contains no calls.

    Formats: JSON objects in <tool_call> tags (Hermes, Qwen), functions with parameters in tags (Qwen3-Coder), JSON
    after [TOOL_CALLS] (Mistral) or <|python_tag|>, and replies that contain only JSON calls (Llama 3). Arguments are an
    object or JSON text. `?text` calls the first tool and suits character-level models.
    """
    if tools and reply.startswith("?"):
        return [(tools[0], reply[1:].strip())]
    text = _THOUGHT_PATTERN.sub("", reply).strip()
    call_texts = [
        match["tagged"] or match["marked"] or match["function"] or ""
        for match in _CALLS_PATTERN.finditer(text)
        # A mention of the tag is not a call.
        if match["end"] or match["tagged"] is None or match["tagged"].lstrip()[:1] in ("{", "[", "<", "`")
    ]
    if not call_texts and _ARGUMENTS_PATTERN.search(text):
        names = "|".join(map(re.escape, tools))
        start = re.search(rf'\A(?:```(?:json)?\s*)?(?=[{{\[])|(?=\{{\s*"name"\s*:\s*"(?:{names})")', text)
        call_texts = [] if start is None else [text[start.end() :]]
    return [call for call_text in call_texts for call in _read_calls(call_text, tools)] or None


def _remove_fence(text: str) -> str:
    """Return the content of a text that is one Markdown code block; return any other text without outer whitespace."""
    match = _FENCE_PATTERN.fullmatch(text.strip())
    return (match[1] if match else text).strip()


def _read_calls(text: str, tools: Sequence[str]) -> list[Call]:
    """Return the calls in the text of one tag, or after one marker such as [TOOL_CALLS]."""
    if functions := _FUNCTION_PATTERN.findall(text):
        bodies = [(name, body.strip(), _PARAMETER_PATTERN.findall(body)) for name, body in functions]
        return [
            _bind_arguments(name, {key: value.strip() for key, value in parts} if parts or not body else body, tools)
            for name, body, parts in bodies
        ]
    rest, calls = _remove_fence(text), []
    try:
        while not calls or rest:
            match = _NAMED_CALL_PATTERN.match(rest)  # calculator[ARGS]{"expression": "1+1"}
            if calls and not match and rest[0] not in "{[":
                break  # text after the calls
            # Programs in arguments often contain line breaks that JSON requires to be escaped.
            value, end = json.JSONDecoder(strict=False).raw_decode(rest, match.end() if match else 0)
            if match:
                value = {"name": match[1], "arguments": value}
            if isinstance(value, dict):
                value = value.get("tool_calls", [value])
            for call in value if isinstance(value, list) else [value]:
                inner = call.get("function", call) if isinstance(call, dict) else {}
                inner = inner if isinstance(inner, dict) else call
                calls.append(_bind_arguments(inner.get("name"), inner.get("arguments", inner.get("parameters")), tools))
            rest = rest[end:].lstrip("; \n\t")
    except (ValueError, RecursionError) as error:
        calls.append(("", f"the call is not valid JSON: {error}"))
    return calls or [("", 'a tool call needs "name" and "arguments"')]


def _bind_arguments(name: Any, arguments: Any, tools: Sequence[str]) -> Call:
    """Bind the arguments of a call to the parameter of a tool by name."""
    if not isinstance(name, str):
        return "", 'a tool call needs "name" and "arguments"'
    if name not in tools:
        return name, ""  # `execute_calls` lists the tools
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return name, arguments
        if not isinstance(parsed, dict):
            return name, arguments
        arguments = parsed
    parameter = _get_parameter(name)
    if not isinstance(arguments, dict) or not arguments:
        return "", f"{name} needs the argument '{parameter or 'text'}'"
    if unknown := [key for key in arguments if key != parameter and (parameter or len(arguments) > 1)]:
        return "", f"{name} takes '{parameter or 'text'}', not '{unknown[0]}'"
    (value,) = arguments.values()
    return name, value if isinstance(value, str) else json.dumps(value)


def _get_parameter(tool: str) -> str | None:
    """Return the name of a tool's parameter, or None if the parameter cannot be passed by name."""
    try:
        first = next(iter(inspect.signature(find_tool(tool)).parameters.values()))
    except (StopIteration, ValueError):
        return None
    return first.name if first.kind is first.POSITIONAL_OR_KEYWORD else None


def execute_calls(calls: Sequence[Call], tools: Sequence[str]) -> str:
    """Execute tool calls and return their answers, one per line; an error of a call is returned as its answer."""
    if len(calls) > MAX_CALLS:
        return f"error: {len(calls)} tool calls in a reply; at most {MAX_CALLS} are executed"
    max_bytes = get_answer_bytes(tools) // len(calls)
    return "\n".join(truncate_text(_execute(call, tools), max_bytes) for call in calls)


def _execute(call: Call, tools: Sequence[str]) -> str:
    name, text = call
    if not name:
        return f"error: {text}"
    if name not in tools:
        return f"error: no tool '{name}'; tools are {', '.join(tools)}"
    try:
        return find_tool(name)(text)
    except ValueError as error:
        return f"error: {error}"


def get_answer_bytes(tools: Sequence[str]) -> int:
    """Return the maximum size in bytes of an answer from any of these tools."""
    return max((getattr(find_tool(name), "answer_bytes", ANSWER_BYTES) for name in tools), default=0)


@dataclass
class _Conversation:
    """State of the conversation in one environment."""

    row: TextRow
    messages: list[Message] = field(default_factory=list)
    images: list[ByteArray] = field(default_factory=list)
    reply: str = ""
    cut_off: bool = False
    turns: int = 0


class ConversationEnv(ReplyEnv):
    """Text environment (`TextEnv`) whose episodes are conversations about the rows of a data set.

    An episode always terminates, because there is no state to bootstrap from after the last reply. If the last reply
    hit the length limit, the episode is truncated as well.
    """

    def __init__(
        self, spec: EnvSpec, cfg: TextSettings, rows: TextRows, reward_runner: RewardRunner, num_envs: int
    ) -> None:
        super().__init__(spec)
        self._reward_coef, self._tools, self._tool_role = cfg.reward_coef, cfg.tools, cfg.tool_role
        self._answer_bytes = get_answer_bytes(cfg.tools)
        self._rows = rows
        self._reward_runner = reward_runner
        self._conversations: list[_Conversation | None] = [None] * num_envs

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start a conversation in each environment; the reset id is the index of the data row."""
        for env_index, start in zip(env_indices, starts, strict=True):
            row = self._rows[start.reset_id]
            self._conversations[env_index] = _Conversation(
                row, list(row.messages), [image.pixels() for image in row.pictures]
            )

    def set_replies(self, env_indices: Sequence[int], replies: Sequence[str], cut_off: BoolArray) -> None:
        """Set the replies [n] of the next `step_chunk`; `cut_off` [n]: True for replies that hit the length limit."""
        for env_index, reply, is_cut_off in zip(env_indices, replies, cut_off, strict=True):
            conversation = self._get_conversation(env_index)
            conversation.reply, conversation.cut_off = remove_image_sizes(reply), bool(is_cut_off)

    def step_chunk(
        self, env_indices: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute the tool calls of replies, and compute the rewards of the replies without a tool call.

        `actions` [n, K, 1] are token ids, with padding below 0. The reward of a conversation is assigned to the
        last token of the last reply.
        """
        result, last = create_reply_result(actions, parts=len(self.spec.reward.components))
        assert result.components is not None
        conversations = [self._get_conversation(env_index) for env_index in env_indices]
        final_rows = [i for i, conversation in enumerate(conversations) if not self._use_tool(conversation)]
        answers = [
            Answer(
                prompt=restore_image_placeholders(
                    next(message.content for message in conversations[i].row.messages[::-1] if message.role != "system")
                ),
                response=conversations[i].reply,
                reference=conversations[i].row.reference,
                tokens=int(last[i]) + 1,
            )
            for i in final_rows
        ]
        for i, reward_result in zip(final_rows, self._reward_runner(answers) if answers else [], strict=True):
            position = i, last[i]
            result.reward[position], result.success[position] = (
                self._reward_coef * reward_result.reward,
                reward_result.success,
            )
            result.terminated[position], result.truncated[position] = True, conversations[i].cut_off
            result.components[i] = reward_result.components
            if reward_result.problem is not None:
                result.reward_errors[env_indices[i]] = reward_result.problem
            conversations[i].messages.append(
                Message(role="assistant", content=truncate_text(conversations[i].reply, FINAL_REPLY_BYTES - 16))
            )
        return result

    def _use_tool(self, conversation: _Conversation) -> bool:
        """Execute the tool calls of a reply, and append the reply and the answers to the conversation.

        Returns False and appends nothing if the reply calls no tool or the conversation has no space for another reply.
        """
        conversation.turns += 1
        calls = find_calls(conversation.reply, self._tools) if conversation.turns < self.spec.text.max_replies else None
        if calls is None:
            return False
        reply_message = Message(role="assistant", content=conversation.reply)
        answer = remove_image_sizes(execute_calls(calls, self._tools))
        answer_message = Message(role=self._tool_role, content=truncate_text(answer, self._answer_bytes))
        messages = [*conversation.messages, reply_message, answer_message]
        if len(join_messages(messages).encode()) > self.spec.text.prompt_bytes - FINAL_REPLY_BYTES:
            return False
        conversation.messages = messages
        return True

    def observe(
        self, env_indices: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None
    ) -> None:
        """Write each image of the prompt into the upper left corner of its array; all other pixels are 0."""
        for env_index, row in zip(env_indices, range(len(env_indices)) if rows is None else rows.tolist(), strict=True):
            images[row] = 0
            for image, pixels in zip(images[row], self._get_conversation(env_index).images, strict=False):
                image[: pixels.shape[0], : pixels.shape[1]] = pixels

    def instruction(self, env_index: int) -> str:
        """Return the messages of the conversation as one prompt."""
        return join_messages(self._get_conversation(env_index).messages)

    def close(self) -> None:
        """Close the reward functions; idempotent."""
        self._reward_runner.close()

    def _get_conversation(self, env_index: int) -> _Conversation:
        conversation = self._conversations[env_index]
        assert conversation is not None, f"environment {env_index} has no conversation; reset it first"
        return conversation
