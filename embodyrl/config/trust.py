"""Checks of untrusted configs for values that run code or connect to servers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.config.compose import conf_dir, write_word
from embodyrl.config.paths import HUB_NAME
from embodyrl.config.settings import Settings, leaves
from embodyrl.registry import installed

TRUST = "trust=true"
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\\$\{")
"""Pattern of `\\${`, which is the text `${`."""
_ENV_VALUE = re.compile(r"\$\{oc\.env:\w+\}")
_DOOR = re.compile(r"[\w.-]+:.*", re.DOTALL)
"""Pattern of values that import code (package.module:attr, package:Id-v0) or are addresses of servers."""
_PLAIN = (
    "video",
    "runner.experiment_name",
    "runner.logger.project_name",
    "algorithm.sampling_params.stop",
    "data.prompt_template",
    "data.system_prompt",
    "data.answer_pattern",
)
"""Keys whose values are never code or addresses."""
_PROGRAMS = ("env.id",)
"""Keys whose value may be a hub repository (owner/name@revision) with code that the run executes."""
STARTED = ("env.python", "model.python")
"""Keys whose value is the path of a program that a run starts."""
_MOVED_MODULES = {"embodyrl.datasets.tasks": "embodyrl.extensions.text.tasks"}
"""Modules by their name in the configs of earlier versions."""


def distrusted(saved: Mapping[str, Any], typed: Mapping[str, Any], file: Path) -> list[str]:
    """Return one line for each value of a saved config that could run code or call a server.

    Accepted values: names of registered components, module paths that an installed package registers or the included
    conf/ uses, and values of keys that are also on the command line. With `trust=true` on the command line all values
    are accepted.

    Args:
        saved: leaves of the file by dotted name, unresolved.
        typed: leaves of the command line.
        file: path of the config, for messages.
    """
    if typed.get("trust") is True:
        return []
    return [
        f"{file}: {key}: {text} runs code or calls a server and is not on the command line. If you trust the "
        f"author of this run, add {TRUST}; to allow only this value, add {write_word(key, value)}."
        for key, value in saved.items()
        if key not in typed and not any(key == name or key.startswith(f"{name}.") for name in _PLAIN)
        for text in (key, *_texts(value))
        if (key in STARTED and text == value)
        or _names_program(key, text)
        or (_may_execute_code_or_connect(text) and not _is_known(text))
    ]


def split_trust(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into `trust=true` arguments and all others."""
    return [word for word in words if word == TRUST], [word for word in words if word != TRUST]


def trust_words(cfg: Settings, further: Mapping[str, Any] | None = None) -> list[str]:
    """Return ["trust=true"] if a command that loads the run's config needs this argument, else an empty list.

    The argument is needed if the config, or the values in `further`, name code to import.
    """
    return [TRUST] if distrusted({**dict(leaves(cfg)), **(further or {})}, {}, Path()) else []


def _names_program(key: str, text: str) -> bool:
    return key in _PROGRAMS and HUB_NAME.fullmatch(text) is not None and "@" in text


def _may_execute_code_or_connect(text: str) -> bool:
    # This user sets the environment variables; other interpolations could hide a path.
    plain = _ENV_VALUE.sub("x", _ESCAPED.sub("$(", text))
    return "${" in plain or _DOOR.fullmatch(plain) is not None


def _is_known(path: str) -> bool:
    if any(entry.group.startswith("embodyrl.") for entry in installed(value=path)):
        return True
    module, _, name = path.partition(":")
    path = f"{_MOVED_MODULES.get(module, module)}:{name}"
    return any(path in file.read_text(encoding="utf-8").split() for file in conf_dir().rglob("*.yaml"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
