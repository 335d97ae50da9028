"""Reading and writing of settings as YAML, in which unquoted text has the same value as on the command line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from embodyrl.errors import ConfigError, shorten

_MAX_BYTES = 1 << 20
"""Maximum size of a file, in bytes."""
_MAX_DEPTH, _MAX_EVENTS = 100, 100_000
"""Maximum number of nested levels, and of parser events: one event per scalar, two per list or mapping."""
_TAG = "tag:yaml.org,2002:"
_INT = r"(?:0|[1-9](?:_?\d)*)"
_POINT = rf"(?:{_INT}?\.\d(?:_?\d)*|{_INT}\.)"
_EXPONENT = r"[eE][+-]?\d(?:_?\d)*"
_COMMAND_LINE_TYPES = {
    "null": re.compile("null", re.IGNORECASE),
    "bool": re.compile("true|false", re.IGNORECASE),
    "int": re.compile(rf"[+-]?{_INT}"),
    "float": re.compile(rf"[+-]?(?:{_POINT}(?:{_EXPONENT})?|{_INT}{_EXPONENT}|inf|nan)", re.IGNORECASE),
}
"""Patterns of the null, booleans and numbers of Hydra's grammar for the command line."""
_YAML_ONLY = re.compile(r"~?|[+-]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
"""Pattern of null, infinity and NaN in YAML, which the command line rejects."""
_LINE_BREAKS = re.compile("[\r\x85\u2028\u2029]")
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BaseLoader):
    """YAML loader for settings: 1e-4 is a number, a date is a string, and duplicate keys are errors."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in (f"{_TAG}float", f"{_TAG}timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(names)) < len(names):
            duplicate = Counter(names).most_common(1)[0][0]
            raise yaml.constructor.ConstructorError(None, None, f"key '{duplicate}' occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


# Hydra reads option files with these numbers, and with times such as 1:30.5.
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"[-+]?\d[\d_]*\.[\d_]*([eE][-+]?\d+)?$|[-+]?\d[\d_]*([eE][-+]?\d+)$|[-+]?\.[\d_]+([eE][-+]?\d+)?$"
        r"|[-+]?\d[\d_]*(:[0-5]?\d)+\.[\d_]*$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes each text that `_Loader` or the command line reads as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = command_line_type(text) == _yaml_type(text) == "str"
    # In single quotes, YAML would fold these rare line breaks.
    style = '"' if _LINE_BREAKS.search(text) else None if is_plain else "'"
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def command_line_type(text: str) -> str:
    """Return the type of an unquoted word on the command line: null, bool, int, float or str."""
    return next((name for name, pattern in _COMMAND_LINE_TYPES.items() if pattern.fullmatch(text)), "str")


def is_yaml_only(text: str) -> bool:
    """Return True for a word of YAML without an equivalent on the command line, for example `.inf`."""
    return _YAML_ONLY.fullmatch(text) is not None


def _yaml_type(text: str) -> str:
    for tag, pattern in _Loader.yaml_implicit_resolvers.get(text[:1], ()):
        if pattern.match(text):
            return tag.removeprefix(_TAG)
    return "str"


def dump_plain_yaml(values: Mapping[str, Any]) -> str:
    """Return nested mappings, lists and scalars as YAML, from which `read_plain_yaml` reads equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_plain_yaml(file: Path) -> dict[Any, Any]:
    """Read YAML that contains only mappings, lists and scalars.

    Raises:
        ConfigError: the file is malformed or too large, is not a mapping, or contains a tag such as
            `!!python/object`, an alias (which can expand to gigabytes), or an unquoted word that the command line
            reads as another type, such as `on` or `12:30`.
    """
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{file} has {size} bytes; a config has at most {_MAX_BYTES}. Use another file.")
        text = file.read_text(encoding="utf-8")
        depth = 0
        # Check parser events before objects are built, so that deep nesting and aliases use no memory.
        for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
            if number > _MAX_EVENTS:
                raise ConfigError(f"{file} has more than {_MAX_EVENTS} keys and values. Use another file.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError(f"{file} has more than {_MAX_DEPTH} nested levels. Use another file.")
            if problem := _find_problem(event):
                raise ConfigError(f"{file}:{event.start_mark.line + 1}: {problem}")
        raw = _Loader(text).get_single_data() or {}
    except (OSError, yaml.YAMLError, ValueError, TypeError) as error:  # TypeError: a key is a list or a mapping
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}. Correct the file.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is not a config. Write lines of the form `key: value`.")
    return raw


def _find_problem(event: yaml.Event) -> str | None:
    """Return the reason, with a fix, why an element of a file is rejected; None: the element is valid."""
    if isinstance(event, yaml.AliasEvent):
        return "YAML aliases are refused, because their size is unbounded; remove the aliases."
    if (tag := getattr(event, "tag", None)) is not None:
        return f"YAML tag '{tag}' is refused, because tags can run code; remove the tag."
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and not is_yaml_only(text := event.value):
        in_yaml, in_override = _yaml_type(text), command_line_type(text)
        if in_yaml != in_override:
            names = {"str": "text", "int": "a number", "float": "a number", "bool": "true or false"}
            return (
                f"{shorten(text)} is {names.get(in_yaml, in_yaml)} in YAML and {names.get(in_override, in_override)} "
                "on the command line. "
                f"Write '{shorten(text)}' in quotes for text; write numbers as 750 or .inf, and true, false or null."
            )
    return None
