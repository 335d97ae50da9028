"""Overrides on the command line, and the values of overrides and files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.config import tree
from embodyrl.config.settings import flat
from embodyrl.errors import ConfigError
from embodyrl.registry import closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

COMMAND_LINE = "command line"
"""The source of an override."""
_LONGEST_WORD = 4000
"""Maximum number of characters of one override."""
_REMOVED = ("rollout.dump",)
"""Keys of version 0.1 without a successor; they are left out of stored runs."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with a value set by a file or argument."""

    key: str
    value: Any
    source: str
    """`COMMAND_LINE`, or the file."""
    words: str = ""
    """The override as written."""

    @property
    def typed(self) -> bool:
        """True for a key of the command line."""
        return self.source == COMMAND_LINE

    @property
    def text(self) -> str | None:
        """Text of a number as written, for keys that are texts: the run name 2026_11_24 is not 20261124."""
        name, _, said = self.words.partition("=")
        return said.strip() if name == self.key else None

    @property
    def where(self) -> str:
        """Prefix of a message."""
        return f"{short(self.words)}: " if self.typed else f"{self.source}: "


def split_words(
    command: str, words: Sequence[str], config_dirs: Sequence[Path], problems: list[str]
) -> tuple[dict[str, str], list[Setting]]:
    """Separate `group=option` from `key=value`, and report all other arguments."""
    groups: dict[str, str] = {}
    settings: list[Setting] = []
    for text in words:
        try:
            name, value = parse_word(text)
        except ConfigError as error:
            problems += error.problems
            continue
        if name in tree.default_options(command):
            if problem := _refuse_option(command, name, value, text, config_dirs):
                problems.append(problem)
            else:
                groups[name] = "null" if value is None else str(value)
        else:
            settings += [Setting(key, leaf, COMMAND_LINE, text) for key, leaf in flat({name: value}).items()]
    return groups, settings


def parse_word(text: str) -> tuple[str, Any]:
    """Split `name=value` as Hydra's grammar reads it.

    >>> parse_word("actor.optim.lr=1e-4")
    ('actor.optim.lr', 0.0001)

    Raises:
        ConfigError: the argument has another form, or adds, removes or sweeps keys.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        if len(text) > _LONGEST_WORD:
            raise ValueError
        override = OverridesParser.create().parse_override(text)
        value = None if override.is_sweep_override() or override.is_delete() else override.value()
    except (HydraException, ValueError, RecursionError):
        raise ConfigError(
            f"Cannot parse '{short(text)}'. Write key=value or group=option without spaces, and quote special "
            "characters: 'key=\"a, b\"'."
        ) from None
    if problem := _refuse_form(text, override):
        raise ConfigError(problem)
    return override.key_or_group, value


def write_word(name: str, text: str) -> str:
    """Return the argument that `parse_word` reads as this text, quoted where the grammar requires it.

    >>> write_word("ckpt", "runs/a"), write_word("ckpt", "runs/a (1)")
    ('ckpt=runs/a', 'ckpt="runs/a (1)"')
    """
    try:
        if parse_word(word := f"{name}={text}") == (name, text):
            return word
    except ConfigError:
        pass  # brackets, commas, an equals sign, ...
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', r"\""), text)
    return f'{name}="{escaped}"'


def _refuse_form(text: str, override: Override) -> str | None:
    name = override.key_or_group
    if override.is_add() or override.is_force_add() or override.is_delete():
        return f"{short(text)}: keys are never added or removed ('+', '++', '~'); write {name}=VALUE."
    if override.is_sweep_override():
        return (
            f"{short(text)}: one value per key; for a list write [a,b], for text with commas quote it: 'key=\"a,b\"'."
        )
    if override.package is not None:
        return f"{short(text)}: '@' is not supported; write {name}=..."
    return None


def _refuse_option(command: str, group: str, option: object, text: str, config_dirs: Sequence[Path]) -> str | None:
    known = tree.options(group, config_dirs)
    nullable = tree.default_options(command)[group] is None
    if (option is None and nullable) or (isinstance(option, str) and option in known):
        own = [file for folder in config_dirs if (file := folder.resolve() / group / f"{option}.yaml").is_file()]
        if own and known[str(option)] != own[0]:
            return f"{short(text)}: {group} '{option}' is built in, so {own[0]} would be ignored; rename the file."
        return None
    if not isinstance(option, str):
        return f"{short(text)}: {group} takes the name of one option: {', '.join(known)}."
    return f"{short(text)}: unknown {group} '{option}'.{closest(option, known)} Available: {', '.join(known)}."


def read_saved(file: Path) -> list[Setting]:
    """Read the `config.yaml` of a run.

    Raises:
        ConfigError: it is missing or broken, or holds YAML tags (they could construct objects).
    """
    saved = flat(tree.read_plain_yaml(file))
    return [Setting(key, value, str(file)) for key, value in saved.items() if key not in _REMOVED]


def short(text: str) -> str:
    """Return a shortened text for a message."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
