"""Find typed keys that have no effect."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from embodyrl.config.settings import Settings, parents_of, spell


def inert(root: Settings, names: Iterable[str], needs: Mapping[str, str]) -> Iterator[str]:
    """Return one line for each of these keys that has no effect with the values of the others; `needs` are conditions
    in addition to those of the classes.
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
        prefix, condition = conditions.get(found, ("", ""))
        alternatives = condition.split(" or ")
        if condition.startswith("never: "):
            yield f"{name} has no effect: {condition.removeprefix('never: ')}."
        elif condition and not any(_holds(root, prefix + one) for one in alternatives):
            yield f"{name} has no effect without {' or '.join(prefix + one for one in alternatives)}."


def _holds(root: Settings, condition: str) -> bool:
    name, operator, choices = re.split("(!=|=|$)", condition, maxsplit=1)
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part, None)
    if not operator:
        return bool(value)
    return (spell(value) in choices.split("|")) is (operator == "=")


def _sections(node: Settings, prefix: str = "") -> Iterator[tuple[str, Settings]]:
    """Return all nodes with the text in front of their keys."""
    yield prefix, node
    for name in type(node).model_fields:
        if isinstance(value := getattr(node, name), Settings):
            yield from _sections(value, f"{prefix}{name}.")
