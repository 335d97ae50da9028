"""Chat templates of model folders, for role checks and token counts without loading the model."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import ConfigError, EmbodyError, reject_malformed
from embodyrl.external_python import ExternalScript
from embodyrl.files import read_json, read_small
from embodyrl.text.model_folder import read_tokenizer

_MAX_WAIT_S = 60.0
"""Deadline for a reply of the process that renders templates, including the start of the process on a busy machine."""
_lock = threading.Lock()
_DOWNLOAD_AGAIN = "Download the file again."
_REPLY = "0x0"
"""Placeholder reply, used to find the text that a chat template adds after a reply."""


class RejectedMessages(Exception):
    """Raised if the chat template rejects a conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a model folder; the template file is selected as in transformers."""

    source: str
    tokens: Mapping[str, str]
    """Text of each special token by name, such as bos_token."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the template, such as enable_thinking."""

    @classmethod
    def from_settings(cls, model: Any, folder: Path) -> ChatTemplate | None:
        """Return the chat template for the config section `model` and the tokenizer in `folder`, or None.

        Policies without the key `chat` use the folder's template.

        Raises:
            ConfigError: the file `model.chat_template` cannot be read, or arguments are set without a template.
        """
        if getattr(model, "chat", None) is False:
            return None
        template, arguments = cls.read(folder), getattr(model, "chat_template_kwargs", {})
        if (path := getattr(model, "chat_template", None)) is not None:
            template = cls(read_template(path), cls._tokens(folder))
        if template is None and arguments:
            raise ConfigError(
                f"model.chat_template_kwargs: the tokenizer in {folder} has no chat template. Set model.chat_template."
            )
        return template and replace(template, arguments=arguments)

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate | None:
        """Read the chat template of the tokenizer or processor in a folder; None if there is no template.

        Raises:
            CheckpointError: a file is damaged.
        """
        config = _read_json(folder / "tokenizer_config.json")
        source = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
        if (file := folder / "chat_template.jinja").is_file():
            with reject_malformed(file, _DOWNLOAD_AGAIN):
                source = read_small(file).decode("utf-8")
        if isinstance(source, list):  # several named templates
            with reject_malformed(folder / "tokenizer_config.json", _DOWNLOAD_AGAIN):
                source = {entry["name"]: entry["template"] for entry in source}
        if isinstance(source, dict):
            source = source.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, cls._tokens(folder))

    @staticmethod
    def _tokens(folder: Path) -> dict[str, str]:
        entries = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in entries.items()}
        return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}

    def render(self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True, parts: bool = False) -> str:
        """Render a conversation as text; with `reply`, append the generation prompt (start of the model's reply).

        With `parts`, the template gets the text of each message as a list of parts, as for models with images.
        Templates are untrusted, so a separate process renders them, with limits of time and memory.

        Raises:
            RejectedMessages: the template rejects the conversation; the exception contains the message of the template.
            ConfigError: the template exceeds a limit.
        """
        if parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        variables = {"messages": list(messages), "add_generation_prompt": reply, "tools": None}
        request = json.dumps((self.source, {**self.tokens, **self.arguments, **variables}))
        try:
            with _lock:
                is_text, text = _start_process(os.getpid()).call(request, _MAX_WAIT_S, "a fixed limit")
        except BaseException as error:
            from embodyrl.text.template_process import CPU_S, MEMORY_BYTES

            _start_process.cache_clear()  # the pipe may still contain a reply
            if not isinstance(error, EmbodyError):
                raise
            raise ConfigError(
                f"The chat template needs more than {CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory for "
                "a conversation. Set model.chat_template=FILE to another template, or model.chat=false."
            ) from error
        if not is_text:
            raise RejectedMessages(text)
        return text

    def render_after_reply(self, *, parts: bool) -> str:
        """Return the text that the template adds after a reply.

        Raises:
            RejectedMessages: the template rejects a question with a reply.
        """
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
        return self.render(turns, reply=False, parts=parts).rpartition(_REPLY)[2]


@lru_cache(maxsize=1)
def _start_process(pid: int) -> ExternalScript:
    """Start the process that renders the templates of this process; `pid` distinguishes forks."""
    script = Path(__file__).with_name("template_process.py")
    return ExternalScript(sys.executable, str(script), key="sys.executable", program="Jinja")


def read_template(path: str) -> str:
    """Return the content of the template file that `model.chat_template` names.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = resolve_asset(path)
    try:
        return read_small(file).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.chat_template={path} cannot be read ({error}). Set the path of a template file."
        ) from error


def find_roles_problem(template: ChatTemplate, roles: Sequence[str], *, parts: bool) -> str | None:
    """Return an error with a fix if the template rejects a sequence of roles, else None.

    `parts`: the content of a message is a list of parts (text, images).
    """

    def get_error(named: Iterable[str]) -> str | None:
        try:
            template.render([{"role": role, "content": "?"} for role in named], parts=parts)
        except RejectedMessages as error:
            return str(error) or "no reason is given"
        return None

    reason = get_error(roles)
    if reason is None:
        return None
    without = [role for role in roles if role != "system"]
    fix = "change the roles of the rows' messages, or set model.chat=false"
    if get_error(without) is None:
        fix = "move the system message into the user's: data.prompt_template instead of data.system_prompt"
    elif get_error("user" if role == "tool" else role for role in roles) is None:
        fix = "set env.tool_role=user"
    elif get_error("user" if role == "tool" else role for role in without) is None:
        fix = "set env.tool_role=user, and data.prompt_template instead of data.system_prompt"
    return f"the chat template rejects the roles {', '.join(roles)} ({reason}). Fix: {fix}."


def read_special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the special tokens of a tokenizer folder, by token text.

    Raises:
        CheckpointError: tokenizer.json is damaged.
    """
    entries = _read_json(file := folder / "tokenizer.json").get("added_tokens") or ()
    with reject_malformed(file, _DOWNLOAD_AGAIN):
        return {entry["content"]: int(entry["id"]) for entry in entries if entry.get("special")}


def find_control_tokens(
    folder: Path, template: ChatTemplate | None, special: Mapping[str, int] | None = None, *, parts: bool = False
) -> dict[str, int]:
    """Return the ids of the special tokens that are not text, by token text.

    A special token is a control token if the model's JSON files list it (bos, eos, pad, images), if the template writes
    it around messages, or if its name contains a word such as "end". Tags in pairs such as <think> and </think> are
    text, and so are tokens that the template does not write, such as [TOOL_CALLS]. Without a template, all special
    tokens except such pairs are control tokens.

    Args:
        folder: model folder.
        template: chat template; None: messages are concatenated.
        special: special tokens; default: those in tokenizer.json.
        parts: the content of a message is a list of parts (text, images).
    """
    special = read_special_tokens(folder) if special is None else special
    configs = [_read_json(folder / name) for name in ("config.json", "generation_config.json")]
    configs += [inner for config in configs for inner in config.values() if isinstance(inner, dict)]
    values = [item for config in configs for key, item in config.items() if re.search(r"_token_(ids?|index)$", key)]
    ids = [token_id for value in values for token_id in (value if isinstance(value, list) else [value])]
    named_tokens = {*ChatTemplate._tokens(folder).values()}
    around, inside = ("", "") if template is None else _render_template_text(template, parts=parts)
    candidates = {
        text for text, token in special.items() if not (token in ids or text in named_tokens or text in around)
    }

    def is_text(text: str) -> bool:
        if text not in candidates or template is None or text in inside or _ENDS.search(text):
            return text in candidates and not candidates.isdisjoint(_paired_tags(text, begins=template is not None))
        return True

    return {text: token for text, token in special.items() if not is_text(text)}


_ENDS = re.compile(r"end|eo[smtu]|stop", re.IGNORECASE)
"""Pattern of the names of tokens that end a text, a turn or an utterance."""


def _paired_tags(text: str, *, begins: bool) -> set[str]:
    """Return the counterparts of a tag: </x> for <x>, [/X] for [X]; with `begins`, also end_x for begin_x, start_x."""
    tags = {text.replace("/", "", 1)} if "/" in text[1:3] else {f"{text[:1]}/{text[1:]}", f"{text[:2]}/{text[2:]}"}
    if begins:
        tags |= {re.sub("end", start, text) for start in ("begin", "start")} | {re.sub("begin|start", "end", text)}
    return tags - {text}


def _render_template_text(template: ChatTemplate, *, parts: bool) -> tuple[str, str]:
    """Return the text that the template writes around messages to the model, and the text around and in replies."""

    def render(*turns: Mapping[str, Any], reply: bool = False) -> str:
        with suppress(RejectedMessages):
            return template.render(turns, reply=reply, parts=parts)
        return ""

    system, user, assistant = ({"role": role, "content": "?"} for role in ("system", "user", "assistant"))
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    tool_request = user, {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "content": "?", "name": "f", "tool_call_id": call["id"]}
    tool = render(*tool_request, answer).removeprefix(render(*tool_request))
    return render(user) + render(system, user) + tool, render(user, assistant, user, reply=True)


def get_opened_tag(template: ChatTemplate, *, parts: bool = False) -> str:
    """Return the tag at the end of the generation prompt that the reply must close, such as `<think>`, or "".

    A tag that the template itself closes after each reply is not returned.
    """
    try:
        prompt = template.render([{"role": "user", "content": "?"}], parts=parts)
        after = template.render_after_reply(parts=parts)
    except RejectedMessages:
        return ""
    tag = re.search(r"[<\[](\w+)[>\]]\s*\Z", prompt)
    return "" if tag is None or f"/{tag[1]}" in after else tag[0]


def remove_control_tokens(text: str, tokens: Iterable[str]) -> str:
    """Remove control tokens from a string, including tokens that a removal creates."""
    names = dict.fromkeys(token for token in tokens if token)
    for token in names:
        text = text.replace(token, "")
    if not any(token in text for token in names):
        return text
    # One pass: repeated replacements take quadratic time for nested tokens.
    remaining: list[str] = []
    lengths, ends = sorted({len(token) for token in names}, reverse=True), {token[-1] for token in names}
    for character in text:
        remaining.append(character)
        for length in lengths if character in ends else ():
            if "".join(remaining[-length:]) in names:
                del remaining[-length:]
                break
    return "".join(remaining)


def find_turn_end_tokens(template: ChatTemplate, folder: Path, *, parts: bool = False) -> dict[str, int]:
    """Return the ids of the control tokens that the template can add after a reply, by token text."""
    try:
        after = template.render_after_reply(parts=parts).lstrip()
    except RejectedMessages:
        return {}  # reported by the check of roles
    return {text: token for text, token in read_special_tokens(folder).items() if after.startswith(text)}


def find_end_token_problem(template: ChatTemplate, folder: Path, *, parts: bool) -> str | None:
    """Return an error if the end-of-turn token of the template is not an EOS token of the model, else None."""
    template_ends = find_turn_end_tokens(template, folder, parts=parts)
    settings = {**_read_json(folder / "config.json"), **_read_json(folder / "generation_config.json")}
    eos_value = settings.get("eos_token_id")
    eos_ids = eos_value if isinstance(eos_value, list) else [eos_value]
    if not template_ends or eos_value is None or any(token in eos_ids for token in template_ends.values()):
        return None
    text, token = next(iter(template_ends.items()))
    return (
        f"the chat template ends a turn with {text} ({token}), but eos_token_id of generation_config.json lacks "
        f"this token: replies do not stop at it, and SFT trains another end token; add {token} to eos_token_id"
    )


def measure_prompts(prompts: Sequence[str], folder: Path | None, *, template: ChatTemplate | None) -> list[int]:
    """Return the number of tokens of each prompt; without a folder, the number of characters.

    Raises:
        ConfigError: the folder has no tokenizer.json.
        CheckpointError: tokenizer.json is damaged.
    """
    if folder is None:
        return [len(prompt) for prompt in prompts]
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing, so prompt lengths are unknown. Fix: use a language model, for example "
            "model=causal_lm model.path=FOLDER, or set data.max_prompt_length=null."
        )
    tokenizer = read_tokenizer(file, _DOWNLOAD_AGAIN)
    encoded = tokenizer.encode_batch(list(prompts), add_special_tokens=template is None)
    return [len(encoding.ids) for encoding in encoded]


def count_unknown_tokens(
    texts: Sequence[str], folder: Path, *, template: ChatTemplate | None
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the number of tokens and of unknown tokens of each text, and the unknown parts of all texts.

    Without tokenizer.json in the folder, all counts are 0.

    Raises:
        CheckpointError: tokenizer.json is damaged.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return [(0, 0)] * len(texts), []
    tokenizer, model = read_tokenizer(file, _DOWNLOAD_AGAIN), _read_json(file)["model"]
    unk = model["unk_id"] if "unk_id" in model else tokenizer.token_to_id(str(model.get("unk_token")))
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=template is None)
    unknown_spans = [
        [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token == unk and span[0] < span[1]]
        for encoding in encoded
    ]
    parts = (text[start:end] for text, spans in zip(texts, unknown_spans, strict=True) for start, end in spans)
    counts = [(len(encoding.ids), len(spans)) for encoding, spans in zip(encoded, unknown_spans, strict=True)]
    return counts, [*dict.fromkeys(parts)]


def find_unknown_token_warnings(texts: Sequence[str], folder: Path, *, template: ChatTemplate | None) -> Iterator[str]:
    """Yield a warning if the tokenizer of a folder does not contain all characters or words of the texts."""
    counts, unknown = count_unknown_tokens(texts, folder, template=template)
    if unknown:
        share = sum(num_unknown for _, num_unknown in counts) / sum(count for count, _ in counts)
        yield (
            f"the tokenizer does not contain {share:.0%} of the tokens in prompts and answers, such as "
            f"{' '.join(unknown[:8])}, and reads all of them as one unknown token; fix: another model, or other rows"
        )


def count_turn_tokens(folder: Path | None, *, template: ChatTemplate | None) -> int:
    """Return the number of tokens that are added around a reply and the tool's answer after it.

    Raises:
        ConfigError: the folder has no tokenizer.json.
    """
    if template is None:
        return 2  # `|` before and after the answer
    texts: list[str] = []
    for role in ("tool", "user"):
        turns = [{"role": name, "content": "0"} for name in ("user", "assistant", role)]
        with suppress(RejectedMessages):
            texts = [template.render(turns[:1]), template.render(turns)]
            break
    lengths = measure_prompts(texts, folder, template=template) or [0, 2]
    return lengths[1] - lengths[0] - 2


def _read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is no file.

    Raises:
        CheckpointError: the file is damaged.
    """
    with reject_malformed(file, _DOWNLOAD_AGAIN):
        return dict(read_json(file)) if file.is_file() else {}
