"""Config sections whose settings class depends on the command or on other values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodyrl.config.settings import Settings


def no_problems(_: Any) -> Iterator[str]:
    """Yield nothing: the default of `problems`."""
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Command and config values from which a section's settings class is chosen."""

    command: str
    values: Mapping[str, Any]
    """Config values by dotted name, untyped."""
    reads_rows: bool
    """True if the environment is a text task with rows in `data` (`EnvFactory.reads_rows`) and the command runs
    episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A config section: the keys under `<name>.` (see `sections` in `plan/schema.py`).

    Every command imports the module of a section, so the module must not import large packages.
    """

    kinds: tuple[type[Settings], ...]
    """All settings classes that the section may have, for help texts and suggestions."""
    choose: Callable[[Chosen], type[Settings] | None]
    """Function that returns the settings class of the section for a command and config values; None: no section."""
    problems: Callable[[Any], Iterator[str]] = no_problems
    """Function that yields an error, with its fix, for each conflict between this section and other config values."""
    derive: Callable[[Any], Mapping[str, Any]] = field(default=lambda _: {})
    """Function that returns derived values of keys by dotted name; applied before the config is final."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Conditions under which keys have an effect, as in `Settings.needs`, but with full dotted names.

    The conditions apply if the config has the section."""


def of_commands(kind: type[Settings], *commands: str) -> Section:
    """Return a section with a single settings class. The section exists only in the given commands."""
    return Section(kinds=(kind,), choose=lambda chosen: kind if chosen.command in commands else None)
