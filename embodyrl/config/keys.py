"""What keys exist: name, type, default and documentation of every field of the schema, for messages and help."""

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from embodyrl.config import components, schema
from embodyrl.registry import closest

_NOUNS: dict[object, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One leaf of the key tree."""

    name: str
    """Dotted name, for example `env.train.total_num_envs`."""
    hint: object
    """Resolved annotation."""
    default: object
    doc: str

    @property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.hint)

    @property
    def base(self) -> object:
        """The annotation without `None`."""
        if isinstance(self.hint, types.UnionType):
            return next(arg for arg in typing.get_args(self.hint) if arg is not type(None))
        return self.hint

    @property
    def free(self) -> bool:
        """A mapping whose keys belong to the user."""
        return typing.get_origin(self.base) is dict

    @property
    def choices(self) -> list[str]:
        """Members of an enum; empty for other types."""
        return [m.value for m in self.base] if isinstance(self.base, type) and issubclass(self.base, Enum) else []

    @property
    def type_text(self) -> str:
        """The type as it is printed in help, for example `int | null` or `bf16 | fp32`."""
        base = self.base
        if self.choices:
            text = " | ".join(self.choices)
        elif isinstance(base, type) and not typing.get_args(base):
            text = base.__name__
        else:
            text = str(base).replace("typing.", "")
        return f"{text} | null" if self.optional else text

    @property
    def expectation(self) -> str:
        """The type in words, for messages."""
        base = self.base
        if self.choices:
            noun = f"one of {', '.join(self.choices)}"
        elif typing.get_origin(base) is list:
            item = typing.get_args(base)[0]
            example = {int: "[0,1]", float: "[0.1,0.9]"}.get(item, "[a,b]")
            noun = f"a list such as {example}"
        elif self.free:
            noun = "a mapping such as {a: 1}"
        else:
            noun = _NOUNS[base]
        return f"{noun} or null" if self.optional else noun


def plain(value: object) -> object:
    """Return enum members by name and everything else unchanged, recursively through lists and mappings."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


def spell(value: object) -> str:
    """Write a value as it is typed on the command line: null, true, [0,1], {a:1}."""
    value = plain(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(spell(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{spell(v)}" for k, v in value.items()) + "}"
    return str(value)


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of every leaf below a config dataclass instance."""
    assert dataclasses.is_dataclass(node)
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings, such as a saved config, by dotted name; an empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def lookup(node: object, name: str) -> object:
    """Return the value at a dotted name of a config dataclass instance."""
    return functools.reduce(getattr, name.split("."), node)


@functools.cache
def _tree() -> tuple[dict[str, Key], tuple[str, ...]]:
    keys: dict[str, Key] = {}
    branches: list[str] = []
    docs: dict[tuple[str, str], str] = {}

    def walk(node: object, prefix: str) -> None:
        hints = typing.get_type_hints(type(node))
        for item in dataclasses.fields(node):  # type: ignore[arg-type]
            value, name = getattr(node, item.name), prefix + item.name
            if dataclasses.is_dataclass(value):
                branches.append(name)
                walk(value, name + ".")
            else:
                doc = docs.get((type(node).__name__, item.name), "")
                keys[name] = Key(name=name, hint=hints[item.name], default=value, doc=doc)

    docs.update(field_docs())
    walk(schema.Config(), "")
    return keys, tuple(branches)


def all_keys() -> dict[str, Key]:
    """Every leaf of the key tree by dotted name."""
    return _tree()[0]


def branches() -> tuple[str, ...]:
    """Every inner node of the key tree, for example `env` and `env.train`."""
    return _tree()[1]


def free_parent(name: str) -> str | None:
    """Return the free mapping that `name` lies below (`custom.lr` -> `custom`), or None."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent in all_keys() and all_keys()[parent].free:
            return parent
    return None


def field_docs() -> dict[tuple[str, str], str]:
    """Documentation of every schema field as (class name, field name) -> first line of the string below it."""
    docs: dict[tuple[str, str], str] = {}
    nodes = [node for module in (schema, components) for node in ast.parse(inspect.getsource(module)).body]
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for stmt, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not (isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name)):
                continue
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            docs[node.name, stmt.target.id] = " ".join(text.split()) if isinstance(text, str) else ""
    return docs


def suggest_key(name: str) -> str:
    """Return " Did you mean '...'?" for an unknown key: the same last part elsewhere, else the nearest spelling."""
    names = [*all_keys(), *branches()]
    tail = name.rpartition(".")[2]
    same_tail = [n for n in names if n.rpartition(".")[2] == tail]
    if same_tail:
        return closest(name, same_tail, cutoff=0.0)
    nearest = closest(name, names, cutoff=0.75)
    if nearest:
        return nearest
    tails = closest(tail, {n.rpartition(".")[2] for n in names}, cutoff=0.75)
    if tails:
        word = tails.split("'")[1]
        return closest(name, [n for n in names if n.rpartition(".")[2] == word], cutoff=0.0)
    return closest(name, names)
