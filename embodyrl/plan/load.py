"""From YAML groups and overrides to typed settings; every problem is found before anything is reported.

Defaults lists say which files there are and in which order; each leaf remembers who set it. What a person
typed must be read by the command and the chosen parts. What a file says about other parts than the chosen ones is left
out, so that nobody is refused for what they did not type.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, create_model

from embodyrl.config import tree as groups_of
from embodyrl.config.compose import compose
from embodyrl.config.settings import (
    Key,
    Settings,
    branches_of,
    find_key,
    flat,
    keys_of,
    nested,
    parents_of,
    plain,
    spell,
)
from embodyrl.errors import ConfigError, hide
from embodyrl.plan import keys
from embodyrl.plan.roots import COMMAND_LINE, ROOTS, PolicyConfig, Root
from embodyrl.registry import closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_LONGEST_WORD = 4000
"""Most characters of one override."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf that somebody set."""

    key: str
    value: Any
    source: str
    """`COMMAND_LINE`, or the file."""
    words: str = ""
    """The override as typed."""

    @property
    def typed(self) -> bool:
        """A person wrote it just now."""
        return self.source == COMMAND_LINE

    @property
    def text(self) -> str | None:
        """A number as it was typed, for where it is a text: 2026_11_24 is no name of the run 20261124."""
        name, _, said = self.words.partition("=")
        return said.strip() if name == self.key else None

    @property
    def where(self) -> str:
        """Text in front of a message."""
        return f"{_short(self.words)}: " if self.typed else f"{self.source}: "


def split_words(
    command: str, words: Sequence[str], config_dirs: Sequence[Path], problems: list[str]
) -> tuple[dict[str, str], list[Setting]]:
    """Separate `group=option` from `key=value`, and report what is neither."""
    groups: dict[str, str] = {}
    settings: list[Setting] = []
    for text in words:
        try:
            name, value = parse_word(text)
        except ConfigError as error:
            problems += error.problems
            continue
        if name in groups_of.default_options(command):
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
        ConfigError: it is no such word, or one that adds, removes or sweeps.
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
            f"Cannot parse '{_short(text)}'. Write key=value or group=option without spaces, and quote special "
            "characters: 'key=\"a, b\"'."
        ) from None
    if problem := _refuse_form(text, override):
        raise ConfigError(problem)
    return override.key_or_group, value


def write_word(name: str, text: str) -> str:
    """The word that `parse_word` reads as this text: quoted where the grammar would see something else in it.

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
        return f"{_short(text)}: keys are never added or removed ('+', '++', '~'); write {name}=VALUE."
    if override.is_sweep_override():
        return (
            f"{_short(text)}: one value per key; for a list write [a,b], for text with commas quote it: 'key=\"a,b\"'."
        )
    if override.package is not None:
        return f"{_short(text)}: '@' is not supported; write {name}=..."
    return None


def _refuse_option(command: str, group: str, option: object, text: str, config_dirs: Sequence[Path]) -> str | None:
    known = groups_of.options(group, config_dirs)
    nullable = groups_of.default_options(command)[group] is None
    if (option is None and nullable) or (isinstance(option, str) and option in known):
        own = [file for folder in config_dirs if (file := folder.resolve() / group / f"{option}.yaml").is_file()]
        if own and known[str(option)] != own[0]:
            return f"{_short(text)}: {group} '{option}' ships, so {own[0]} would not be read; give it another name."
        return None
    if not isinstance(option, str):
        return f"{_short(text)}: {group} takes the name of one option: {', '.join(known)}."
    return f"{_short(text)}: unknown {group} '{option}'.{closest(option, known)} Available: {', '.join(known)}."


def compose_groups(
    command: str, groups: Mapping[str, str], config_dirs: Sequence[Path], problems: list[str]
) -> list[Setting]:
    """Return what the files of the chosen options say, untyped and unresolved; later ones win."""
    folders = tuple(groups_of.search_path(config_dirs))
    # What ships does not change while the program runs.
    composed = _compose if len(folders) > 1 else _compose_shipped
    try:
        return list(composed(groups_of.root_file(command), tuple(groups.items()), folders))
    except ConfigError as error:
        problems.append(f"Cannot compose {', '.join(f'{g}={o}' for g, o in groups.items()) or command}: {error}")
        return []


def _compose(root: str, groups: tuple[tuple[str, str], ...], folders: tuple[Path, ...]) -> tuple[Setting, ...]:
    found = compose(root, dict(groups), folders)
    return tuple(Setting(key, value, source) for key, (value, source) in found.items())


_compose_shipped = functools.cache(_compose)


_REMOVED = ("rollout.dump",)
"""Keys of version 0.1 without a successor; they are left out of stored runs."""


def read_saved(file: Path) -> list[Setting]:
    """Read the `config.yaml` of a run.

    Raises:
        ConfigError: it is missing or broken, or holds YAML tags (they could construct objects).
    """
    saved = flat(groups_of.read_plain_yaml(file))
    return [Setting(key, value, str(file)) for key, value in saved.items() if key not in _REMOVED]


def build(settings: Sequence[Setting], command: str, problems: list[str]) -> tuple[Root, dict[str, str], list[str]]:
    """Turn leaves into typed settings.

    Args:
        settings: who set what; later ones win.
        command: whose keys there are; they depend on the values of some.
        problems: what was found before; grows.

    Returns:
        The settings, where each value came from (absent: the default), and a warning of the typed keys that have no
        effect because the command or the chosen parts do not read it.

    Raises:
        ConfigError: one line per problem.
    """
    last: dict[str, Setting] = {}
    for setting in settings:
        for covered in [k for k in last if _covers(setting.key, k) or _covers(k, setting.key)]:
            # An empty mapping says nothing; anything else replaces what was below or above it.
            if not (_covers(setting.key, covered) and setting.value == {}):
                del last[covered]
        if setting.value != {} or not any(_covers(setting.key, k) for k in last):
            last.pop(setting.key, None)
            last[setting.key] = setting
    # Before the classes are chosen: a name such as env.env_type may itself be an interpolation.
    values = _resolved(last, command, problems)
    root, unclear = keys.choose(command, values, problems)
    # Typed, it leaves out what files say below it, where names are the user's own.
    emptied = {setting.key for setting in settings if setting.typed and setting.value == {}}
    read: dict[str, Any] = {}
    unread: dict[str, list[str]] = {}
    for name, value in values.items():
        key = find_key(root, name)
        if key is not None and key.name in emptied and not last[name].typed:
            continue
        if key is not None:
            # A number is a fine text, where it was not written as one by mistake.
            number = key.kind is str and isinstance(value, int | float) and not isinstance(value, bool)
            said = last[name].text if value is last[name].value else None
            read[name] = (said or str(value)) if number and (said or isinstance(value, int)) else value
        elif (not last[name].typed or keys.is_known(name)) and _is_unclear(name.partition(".")[0], root, unclear):
            continue
        elif _is_for_others(command, last[name]):
            unread.setdefault(f"`embodyrl {command}`", []).append(name)
        elif not keys.is_known(name) or name in branches_of(root):
            problems += _refuse_key(root, last[name])
        elif last[name].typed:
            _report_unread(last[name], value, keys.reader(command, name, values), problems, unread)
    # Checked as JSON, strictly: no text becomes a number, no number a truth value.
    text = json.dumps(nested(read), default=str)
    problems += wrong_values(root, text, last)
    if problems:
        raise ConfigError(problems)
    return (
        root.model_validate_json(text, strict=True),
        {name: last[name].source for name in read},
        _unread_lines(unread),
    )


def _unread_lines(unread: Mapping[str, list[str]]) -> list[str]:
    """Return a warning for each reader, with the keys that it does not read."""
    return [
        f"{_short(names[0])} has no effect: {reader} does not read {_short(names[0])}."
        if len(names) == 1
        else f"{', '.join(map(_short, names))} have no effect: {reader} does not read them."
        for reader, names in unread.items()
    ]


def _covers(name: str, other: str) -> bool:
    return other.startswith(f"{name}.")


def _resolved(last: Mapping[str, Setting], command: str, problems: list[str]) -> dict[str, Any]:
    """Values with `${...}` (of what was set, or is a default) and `???` resolved; what cannot be is reported and left
    out.
    """
    values = {name: setting.value for name, setting in last.items()}
    marked = [name for name, value in values.items() if "${" in str(value) or "???" in str(value)]
    if not marked:
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Replaced by one that remembers what it gave, so that no message or file shows a secret (`errors.masked`).
    OmegaConf.register_new_resolver("oc.env", _env_value, replace=True)
    root, _ = keys.choose(command, {name: value for name, value in values.items() if name not in marked}, [])
    said = {at for name in values for at in (name, *parents_of(name))}
    unset = {
        name: plain(key.default)
        for name, key in keys_of(root).items()
        if name not in said and values.keys().isdisjoint(parents_of(name)) and not key.required
    }
    whole = OmegaConf.create(nested({**unset, **values}))
    for name in marked:
        try:
            value = OmegaConf.select(whole, name, throw_on_missing=True)
            values[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            del values[name]
            problems.append(f"{last[name].where}{name} cannot be resolved: {str(error).splitlines()[0]}.")
    return values


def _env_value(name: str, *default: str | None) -> Any:
    from omegaconf.resolvers.oc import env

    value = env(name, *default)
    if name in os.environ:
        hide(name, os.environ[name])
    return value


def _is_unclear(group: str, root: type[Settings], unclear: frozenset[str]) -> bool:
    """Whether a group might exist, or have other keys, if some choice were right."""
    return group in unclear or (bool(unclear) and group not in root.model_fields)


def _refuse_key(root: type[Settings], setting: Setting) -> list[str]:
    name = setting.key
    if name in branches_of(root):
        if setting.value == {}:
            return []
        return [f"{setting.where}{name} is a group of keys, not one key; `embodyrl show {name}` lists them."]
    hint = keys.suggest(name, root) or " `embodyrl show train` lists all keys."
    return [f"{setting.where}unknown key '{_short(name)}'.{hint}"]


def _is_for_others(command: str, setting: Setting) -> bool:
    """Return whether a typed word is a group of `embodyrl train`, which may lead a line of arguments for all commands;
    for a command without a policy, also weights, reward or data.
    """
    name = setting.key
    group = name in groups_of.default_options("train") and name != "experiment" and isinstance(setting.value, str)
    with_policy = issubclass(ROOTS[command], PolicyConfig)
    return setting.typed and (group or (not with_policy and name.partition(".")[0] in ("ckpt", "reward", "data")))


def _report_unread(
    setting: Setting, value: Any, reader: str, problems: list[str], unread: dict[str, list[str]]
) -> None:
    """Note that a known key has no effect here; refuse a key of another environment or model, and a wrong value."""
    name = setting.key
    if reader.startswith(("env_type ", "model_type ")) or name == "ckpt":  # other weights change every result
        problems.append(f"{setting.where}{reader} does not read {_short(name)}; leave it out.")
        return
    known = keys.keys_below(name.partition(".")[0])
    found = next((at for at in (name, *parents_of(name)) if at in known), None)
    if found is None:  # a key of earlier versions, or a group of keys
        problems.append(f"{setting.where}{reader} does not read {_short(name)}; leave it out.")
    elif found == name and (wrong := _wrong_value(known[name], value)):
        problems += wrong
    elif value != plain(known[found].default):
        unread.setdefault(reader, []).append(name)


def _wrong_value(key: Key, value: Any) -> list[str]:
    """Return what is wrong with a value of a key that the config does not have."""
    fields: dict[str, Any] = {"value": (key.field.annotation, key.field)}
    kind = create_model(key.owner.__name__, __base__=Settings, **fields)
    lines = wrong_values(kind, json.dumps({"value": value}, default=str))
    return [line.replace("value=", f"{key.name}=", 1) for line in lines]


def wrong_values(root: type[Settings], text: str, last: Mapping[str, Setting] = MappingProxyType({})) -> list[str]:
    """Say what is wrong with values, as JSON, one line each; `last` knows who set them."""
    try:
        root.model_validate_json(text, strict=True)
    except ValidationError as error:
        return list(dict.fromkeys(_wrong_values(root, last, error)))
    return []


def _wrong_values(root: type[Settings], last: Mapping[str, Setting], error: ValidationError) -> Iterator[str]:
    for one in error.errors(include_url=False):
        parts = [str(part) for part in one["loc"]]
        names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        name = next((n for n in names if find_key(root, n) is not None), names[0])
        key, setting = find_key(root, name), last.get(name)
        if key is None or one["type"] == "missing":
            yield f"{name} is not set."
            continue
        value = plain(setting.value if setting else one["input"])
        said = f"{setting.where if setting else ''}{name}={_short(spell(value))} "
        if setting and setting.typed:
            said = setting.where
        default = "" if key.required else f" Default: {spell(key.default)}."
        yield f"{said}must be {key.expectation}.{closest(str(value), key.choices)}{default}"


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
