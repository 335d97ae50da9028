"""Base classes of all settings.

A settings class is defined next to the code that uses it; `plan/schema.py` combines the classes into a config.

A field defines type, range and default of a key; the string below the field is the key's documentation. Values come
from YAML and the command line. Types are strict: a string is not converted to a number, nor a number to a boolean.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from embodyrl.errors import ConfigError


def valid_if(is_valid: Callable[[Any], bool]) -> AfterValidator:
    """Return a validator that rejects values for which `is_valid` is false.

    The error text is the field's `Constraint`.
    """

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError
        return value

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Annotation of a type with the description of its constraint, printed in errors after "must be"."""

    wording: str


class ChangesStateIds:
    """Annotation of config keys that change which initial state each state id refers to."""


Count = Annotated[int, Field(ge=1, le=10**6)]
"""Integer from 1 to 10^6."""
Index = Annotated[int, Field(ge=0, lt=2**63)]
CountOrAll = Annotated[int, Field(ge=-1, le=10**9), valid_if(bool), Constraint("at least 1, or -1")]
"""Integer of at least 1, or -1 for all or no limit."""
Seconds = Annotated[float, Field(gt=0, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=10**9)]
Positive = Annotated[float, Field(gt=0, le=10**9)]
# No file system supports longer names, and opening such a path raises an unclear error.
_has_short_names = valid_if(lambda v: all(len(part.encode()) < 256 for part in v.split("/")))
Path = Annotated[
    str, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$", max_length=4000), _has_short_names, Constraint("a path")
]
Name = Annotated[
    str,
    Field(pattern=r"^[^./\s\x00][^/\s\x00]*$", max_length=100),
    Constraint("a name without '/' and spaces that does not begin with a dot"),
]


class Settings(BaseModel):
    """Base class of settings, with one config key per field; values are typed and frozen.

    >>> class Plan(Settings):
    ...     steps: Count = 3
    ...     '''Steps to take.'''
    >>> Plan().updated({"steps": 4}).steps
    4
    """

    # Validators are built at first use, because a command uses few of the classes.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    keys_by_condition: ClassVar[Mapping[str, str]] = {}
    """Conditions under which keys have an effect, as {condition: keys}: `{"kl_in_reward": "kl_target kl_horizon"}`. A
    condition is `key` (the key is set), `key=a|b` or `key!=a|b`. Conditions are joined with " and ", then with " or ";
    a reason is appended as ": reason". Keys that start with / are relative to the whole config. "never: reason" is
    always false."""

    def __eq__(self, other: object) -> bool:
        """Return True if classes and values are equal, regardless of the sources of the values."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def problems(self) -> Iterator[str]:
        """Yield one message per conflict between values, with the fix."""
        yield from ()

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (dotted name, value) of every key of these settings and of all nested settings."""
        for name in self.used_fields():
            if not isinstance(value := getattr(self, name), Settings):
                yield prefix + name, value
        for name, section in self.nested():
            yield from section.leaves(prefix + name)

    def used_fields(self) -> Iterable[str]:
        """Return the names of the fields that are keys or sections of the current command; by default all fields."""
        return type(self).model_fields

    def nested(self) -> Iterator[tuple[str, Settings]]:
        """Yield (prefix of the keys, settings) of each field of type Settings."""
        for name in self.used_fields():
            if isinstance(value := getattr(self, name), Settings):
                yield f"{name}.", value

    def nodes(self, prefix: str = "") -> Iterator[tuple[str, Settings]]:
        """Yield (prefix of the keys, settings) of these settings and of all nested settings."""
        yield prefix, self
        for name, section in self.nested():
            yield from section.nodes(prefix + name)

    def get(self, name: str) -> Any:
        """Return the value of a key by dotted name; None: the settings have no such key."""
        return functools.reduce(lambda node, part: getattr(node, part, None), name.split("."), self)

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with the given values, by dotted key; the values are not validated.

        Raises:
            ConfigError: a name is not a key, or belongs to a section that is None.
        """
        changes: dict[str, Any] = {}
        for name, value in values.items():
            head, _, subkey = name.partition(".")
            if head not in type(self).model_fields:
                raise ConfigError(f"{type(self).__name__} has no key '{name}'.")
            section = changes.get(head, getattr(self, head))
            if subkey and not isinstance(section, Settings):
                reason = f"because its {head} is {section!r}. Set `{head}` to settings first."
                raise ConfigError(f"{type(self).__name__} has no key '{subkey}' {reason}")
            changes[head] = section.updated({subkey: value}) if isinstance(section, Settings) and subkey else value
        return self.model_copy(update=changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A config key: the dotted name of a field of a settings class."""

    name: str
    """Dotted name, for example `env.train.total_num_envs`."""
    owner: type[Settings]
    field: FieldInfo

    @property
    def default(self) -> Any:
        """Default value; None also for required keys."""
        return None if self.required else self.field.get_default(call_default_factory=True)

    @property
    def required(self) -> bool:
        """True if the key has no default."""
        return self.field.is_required()

    @property
    def doc(self) -> str:
        """Help text of the key in one line."""
        return " ".join((self.field.description or "").split())

    @property
    def _type(self) -> tuple[Any, list[Any], bool]:
        """Return the type without annotations, the annotations' metadata, and True if null is allowed."""
        hint, metadata, optional = self.field.annotation, list(self.field.metadata), False
        while True:
            if typing.get_origin(hint) is Annotated:
                hint, *annotations = typing.get_args(hint)
                metadata += annotations
            elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
                optional |= type(None) in typing.get_args(hint)
                hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
            else:
                break
        flat_metadata = [
            part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return hint, flat_metadata, optional

    @property
    def kind(self) -> Any:
        """Type of the values, without bounds and null."""
        return self._type[0]

    @property
    def metadata(self) -> list[Any]:
        """Annotations of the type, such as bounds and error texts."""
        return self._type[1]

    @property
    def is_mapping(self) -> bool:
        """True if the value is a mapping with arbitrary keys, which the user defines."""
        hint = self._type[0]
        return hint is dict or typing.get_origin(hint) is dict

    @property
    def choices(self) -> list[str]:
        """Allowed values of an enumeration or literal; empty for other types."""
        hint = self._type[0]
        if typing.get_origin(hint) is typing.Literal:
            return [str(choice) for choice in typing.get_args(hint)]
        return [member.value for member in hint] if isinstance(hint, type) and issubclass(hint, Enum) else []

    @property
    def type_text(self) -> str:
        """Type for help texts, for example `int | null` or `bf16 | fp32`."""
        hint, _, optional = self._type
        is_plain = isinstance(hint, type) and not typing.get_args(hint)
        text = " | ".join(self.choices) or (hint.__name__ if is_plain else str(_strip_bounds(hint)))
        text = text.replace("typing.", "")
        return f"{text} | null" if optional else text

    @property
    def expectation(self) -> str:
        """Description of the valid type and range, which error messages print after "must be"."""
        hint, metadata, optional = self._type
        description = next((item.wording for item in metadata if isinstance(item, Constraint)), None)
        if description is None:
            description = f"one of {', '.join(self.choices)}" if self.choices else _describe_type(hint, metadata)
        return f"{description} or null" if optional and "null" not in description else description


def _strip_bounds(hint: Any) -> Any:
    """Return a list type without the bounds of its elements, such as list[int]; return other types unchanged."""
    arguments = typing.get_args(hint)
    return list[arguments[0].__origin__] if arguments and typing.get_origin(arguments[0]) is Annotated else hint


def _describe_type(hint: Any, metadata: list[Any]) -> str:
    if typing.get_origin(hint) is list:
        example = {int: "[0,1]", float: "[0.1,0.9]"}.get(typing.get_args(_strip_bounds(hint))[0], "[a,b]")
        return f"a list such as {example}"
    if hint is dict or typing.get_origin(hint) is dict:
        return "a mapping such as {a: 1}"
    noun = {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))
    phrases = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "below"}
    bounds = [
        (operator, getattr(item, operator)) for item in metadata for operator in phrases if hasattr(item, operator)
    ]
    return " ".join([noun, " and ".join(f"{phrases[operator]} {bound}" for operator, bound in bounds)]).strip()


@functools.cache
def get_keys(kind: type[Settings], prefix: str = "") -> dict[str, Key]:
    """Return all keys of a settings class by dotted name."""
    keys: dict[str, Key] = {}
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Settings):
            keys |= get_keys(annotation, f"{prefix}{name}.")
        else:
            keys[prefix + name] = Key(name=prefix + name, owner=kind, field=field)
    return keys


def get_parents(name: str) -> Iterator[str]:
    """Yield the names of the sections that contain a key, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def is_key_or_subkey(name: str, keys: Iterable[str]) -> bool:
    """Return True if `name` is one of `keys`, or a subkey of one of them."""
    return any(f"{name}.".startswith(f"{key}.") for key in keys)


def find_key(keys: Mapping[str, Key], name: str) -> Key | None:
    """Return the key with this name, or the key whose value is a mapping with this entry; None: unknown."""
    if name in keys:
        return keys[name]
    return next((keys[parent] for parent in get_parents(name) if parent in keys and keys[parent].is_mapping), None)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Build nested mappings from values by dotted name; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, leaf_name = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf_name] = value
    return tree


def to_builtin(value: object) -> Any:
    """Convert enum members to their values and settings to mappings, also inside containers."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Settings):
        return nested({name: to_builtin(leaf) for name, leaf in value.leaves()})
    if isinstance(value, Mapping):
        return {key: to_builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtin(item) for item in value]
    return value


def format_value(value: object, format_text: Callable[[str], str] = str) -> str:
    """Format a value as on the command line, for example null, true, [0,1] or {a:1}; `format_text` may add quotes."""
    value = to_builtin(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(format_value(item, format_text) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{format_value(item, format_text)}" for key, item in value.items()) + "}"
    return format_text(value) if isinstance(value, str) else str(value)
