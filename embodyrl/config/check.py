"""Find wrong values, and command-line keys without effect."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from embodyrl.config.settings import Key, Settings, find_key, nested, parents_of, plain, spell
from embodyrl.config.words import Setting, short
from embodyrl.registry import closest

S = TypeVar("S", bound=Settings)


def inert(root: Settings, names: Iterable[str], needs: Mapping[str, str]) -> Iterator[str]:
    """Return one line for each of these keys that has no effect, given the other values.

    `needs` are conditions in addition to those of the classes.
    """
    conditions = {key: ("", condition) for condition, keys in needs.items() for key in keys.split()} | {
        prefix + key: (prefix, condition)
        for prefix, node in _sections(root)
        for kind in reversed(type(node).__mro__)
        for condition, keys in kind.__dict__.get("needs", {}).items()
        for key in keys.split()
    }
    for name in names:
        found = next((at for at in (name, *parents_of(name)) if at in conditions), name)
        prefix, text = conditions.get(found, ("", ""))
        condition, _, reason = text.partition(": ")
        alternatives = [one[1:] if one.startswith("/") else prefix + one for one in condition.split(" or ")]
        if condition and not any(_holds(root, one) for one in alternatives):
            yield f"{name} has no effect" + (f": {reason}." if reason else f" without {' or '.join(alternatives)}.")


def _holds(root: Settings, condition: str) -> bool:
    name, operator, choices = re.split("(!=|=|$)", condition, maxsplit=1)
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part, None)
    if not operator:
        return bool(value)
    return (spell(value) in choices.split("|")) is (operator == "=")


def _sections(node: Settings, prefix: str = "") -> Iterator[tuple[str, Settings]]:
    """Return all nodes with the prefix of their keys."""
    yield prefix, node
    for name in type(node).model_fields:
        if isinstance(value := getattr(node, name), Settings):
            yield from _sections(value, prefix if name == node.flattened else f"{prefix}{name}.")


def validated(
    root: type[S], values: Mapping[str, Any], problems: list[str], last: Mapping[str, Setting] = MappingProxyType({})
) -> S | None:
    """Return the settings of these values by dotted name; None after a wrong one, with a line in `problems` for each.

    Values are checked as JSON, strictly: no text becomes a number, no number a truth value. `last` contains the source
    of each value.
    """
    tree, below, wrong = nested(values), {}, []
    for name, kind in root.inlined.items():
        section, info = tree.get(name, {}), root.model_fields[name]
        own = {key: value for key, value in section.items() if key in kind.model_fields}
        others = getattr(info.annotation, "model_fields", {})
        tree[name] = {key: value for key, value in section.items() if key not in own or key in others}
        below[name] = _valid(kind, own, f"{name}.", root, last, wrong)
    whole = _valid(root, tree, "", root, last, wrong)
    problems += dict.fromkeys(wrong)
    if whole is None or wrong:
        return None
    sections = {name: getattr(whole, name) for name in below}
    complete = {name: s.model_copy(update={s.flattened: below[name]}) for name, s in sections.items()}
    return whole.model_copy(update=complete)


def _valid(
    kind: type[S], tree: Any, prefix: str, root: type[Settings], last: Mapping[str, Setting], problems: list[str]
) -> S | None:
    try:
        return kind.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems += _wrong_values(root, prefix, last, error)
    return None


def _wrong_values(
    root: type[Settings], prefix: str, last: Mapping[str, Setting], error: ValidationError
) -> Iterator[str]:
    for one in error.errors(include_url=False):
        parts = [*prefix.split(".")[:-1], *(str(part) for part in one["loc"])]
        names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        name = next((n for n in names if find_key(root, n) is not None), names[0])
        key, setting = find_key(root, name), last.get(name)
        if key is None or one["type"] == "missing":
            yield f"{name} is not set."
            continue
        value = plain(setting.value if setting else one["input"])
        said = f"{setting.where if setting else ''}{name}={short(spell(value))} "
        if setting and setting.typed:
            said = setting.where
        default = "" if key.required else f" Default: {spell(key.default)}."
        yield f"{said}must be {key.expectation}.{closest(str(value), key.choices)}{default}"


def wrong_value(key: Key, value: Any) -> list[str]:
    """Return the errors of a value of a key that the config does not have."""
    fields: dict[str, Any] = {"value": (key.field.annotation, key.field)}
    kind = create_model(key.owner.__name__, __base__=Settings, **fields)
    lines: list[str] = []
    validated(kind, {"value": value}, lines)
    return [line.replace("value=", f"{key.name}=", 1) for line in lines]
