"""Config sections that extensions add: entry points of the group `embodyrl.sections`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodyrl.config.settings import Settings
from embodyrl.registry import Registry


def no_problems(_: Any) -> Iterator[str]:
    """Yield nothing: the default of `problems`."""
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The choices on which the class of a section may depend."""

    command: str
    values: Mapping[str, Any]
    """Config values by dotted name, untyped."""
    reads_rows: bool
    """The environment consists of rows of text (`EnvFactory.reads_rows`), and the command runs its episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The keys below one name, which is the name of the entry point.

    The module of a section is imported by every command: it defines settings and imports nothing heavy.
    """

    kinds: tuple[type[Settings], ...]
    """All classes that the section may have, for help and suggestions."""
    choose: Callable[[Chosen], type[Settings] | None]
    """Return the class of the section; None: the section does not exist with these choices."""
    problems: Callable[[Any], Iterator[str]] = no_problems
    """Yield contradictions between this section and others of the config, one line each with the fix."""
    derive: Callable[[Any], Mapping[str, Any]] = field(default=lambda _: {})
    """Return values of any keys that follow from others, by dotted name; they are set before the config is final."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Conditions of keys with their full names, as in `Settings.needs`, that hold where the section exists."""


def of_commands(kind: type[Settings], *commands: str) -> Section:
    """Return a section of one class that exists for these commands."""
    return Section(kinds=(kind,), choose=lambda chosen: kind if chosen.command in commands else None)


SECTIONS: Registry[Section] = Registry(
    "section", group="embodyrl.sections", wants="a Section", fits=lambda found: isinstance(found, Section)
)
