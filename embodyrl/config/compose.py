"""Parsing of overrides and composition of the YAML files in conf/ and `--config-dir`, with Hydra."""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embodyrl.config import tree
from embodyrl.config.paths import conf_dir
from embodyrl.config.settings import flat
from embodyrl.config.tree import read_plain_yaml, root_file, search_path, variants
from embodyrl.errors import ConfigError
from embodyrl.registry import closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

COMMAND_LINE = "command line"
"""Source of settings from the command line."""
_LONGEST_WORD = 4000
"""Maximum number of characters of one override."""
_REMOVED = ("rollout.dump",)
"""Removed keys of version 0.1, which are ignored in configs of old runs."""
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with the value that a file or a command-line argument sets."""

    key: str
    value: Any
    source: str
    """`COMMAND_LINE`, or the path of the file that sets the value."""
    words: str = ""
    """Override as written by the user; empty for values from files."""

    @property
    def typed(self) -> bool:
        """True if the command line sets the key."""
        return self.source == COMMAND_LINE

    @property
    def text(self) -> str | None:
        """Unparsed value from the command line, for keys of type str: 2026_11_24 must not become 20261124."""
        name, _, said = self.words.partition("=")
        return said.strip() if name == self.key else None

    @property
    def where(self) -> str:
        """Prefix of error messages that contains the source of the setting."""
        return f"{short(self.words)}: " if self.typed else f"{self.source}: "


def split_words(
    command: str, words: Sequence[str], config_dirs: Sequence[Path], problems: list[str]
) -> tuple[dict[str, str], list[Setting]]:
    """Separate `group=option` from `key=value` arguments; append a message to `problems` for each invalid argument."""
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
    """Parse `name=value` with Hydra's grammar, and return the name and the typed value.

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
    """Return the argument `name=text`, with quotes if Hydra's grammar requires quotes.

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
        ConfigError: the file is missing or malformed, or contains YAML tags (which could construct objects).
    """
    saved = flat(tree.read_plain_yaml(file))
    return [Setting(key, value, str(file)) for key, value in saved.items() if key not in _REMOVED]


def short(text: str) -> str:
    """Format text for an error message: at most about 120 characters, with escaped control characters."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def compose(command: str, groups: Mapping[str, str], config_dirs: Sequence[Path]) -> list[Setting]:
    """Return the unresolved values from the root file of a command and from the chosen group options.

    Raises:
        ConfigError: one line, with the reason given by `compose_files`.
    """
    folders = tuple(search_path(config_dirs))
    # Included files do not change while the program runs.
    composed = compose_files if len(folders) > 1 else _compose_shipped
    try:
        return list(composed(root_file(command), tuple(groups.items()), folders))
    except ConfigError as error:
        options = ", ".join(f"{group}={option}" for group, option in groups.items())
        raise ConfigError(f"Cannot compose {options or command}: {error}") from None


def compose_files(root: str, typed: tuple[tuple[str, str], ...], folders: tuple[Path, ...]) -> tuple[Setting, ...]:
    """Return the values from a root file and group options, with interpolations unresolved, each with its source file.

    Args:
        root: name of the file with the defaults list.
        typed: options of groups from the command line; they override the options of files.
        folders: search folders; the first folder with a file wins.

    Raises:
        ConfigError: a file or group does not exist, a file is not plain YAML, or Hydra cannot read a defaults list.
    """
    from hydra import compose as compose_by_hydra
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    groups = dict(typed)
    shipped, *more = (str(folder) for folder in folders)
    # Check the files before Hydra reads them, because Hydra expands aliases without a limit.
    for group, option in groups.items() if more else ():
        try:
            deque(_keys_of(f"{group}/{option}", folders), maxlen=0)
        except RecursionError:
            raise ConfigError(f"the defaults of {group}={option} form a cycle; remove one entry.") from None
    # Hydra cannot override an option with null, but null is the default of the groups that accept null.
    _store_variants()
    words = [f"{group}={option}" for group, option in groups.items() if option != "null"]
    words += [f"hydra.searchpath={json.dumps([f'file://{folder}' for folder in more])}"] * bool(more)
    try:
        with _own_hydra(), initialize_config_dir(shipped, version_base="1.3"):
            cfg = compose_by_hydra(root, overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    choices = dict(cfg.hydra.runtime.choices)
    if wrong := next((group for group, option in groups.items() if option == "null" and choices.get(group)), None):
        raise ConfigError(f"{wrong}=null has no effect: another option selects {wrong}={choices[wrong]}. Remove one.")
    with open_dict(cfg):
        del cfg.hydra
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    files = dict(_keys_of(root, folders))
    for entry in read_plain_yaml(folders[0] / f"{root}.yaml")["defaults"]:
        group = next(iter(entry)).removeprefix("optional ") if isinstance(entry, dict) else ""
        if choices.get(group) is not None:
            files |= dict(_keys_of(f"{group}/{choices[group]}", folders))
    default = f"{folders[0].name}/{root}.yaml"
    return tuple(Setting(key, value, files.get(key, default)) for key, value in flat(values).items())


_compose_shipped = functools.cache(compose_files)


@functools.cache
def _store_variants() -> None:
    """Register variants, which are options without files, in Hydra's config store."""
    from hydra.core.config_store import ConfigStore

    for group in read_plain_yaml(conf_dir() / "variants.yaml"):
        for name, variant in variants(group).items():
            node = {"defaults": [*([variant.base] if variant.base else []), "_self_"], **variant.values}
            ConfigStore.instance().store(name=name, node=node, group=group, provider="embodyrl")


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Clear Hydra's global state inside the block, then restore the state of another Hydra application."""
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    other = GlobalHydra.instance().hydra
    added = [name for name in ("hydra", "now", "python_version") if not OmegaConf.has_resolver(name)]
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = other
        for name in added:
            OmegaConf.clear_resolver(name)


def _keys_of(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (key, name of the file that sets the key) for a file and the files in its defaults list."""
    folder = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    group, _, option = name.rpartition("/")
    if folder is None:
        if variant := variants(group).get(option):
            if variant.base:
                yield from _keys_of(f"{group}/{variant.base}", folders)
            yield from ((key, f"{folders[0].name}/{name}") for key in flat(variant.values, f"{group}."))
        return
    file = folder / f"{name}.yaml"
    body = read_plain_yaml(file)
    defaults = body.pop("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}: defaults must be a list.")
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            yield from _keys_of(f"{group}/{entry}" if group else entry, folders)
    match = _PACKAGE.match(file.read_text(encoding="utf-8"))
    package = group.replace("/", ".") if match is None else match[1].removeprefix("_global_")
    source = f"{folder.name}/{name}.yaml" if folder == folders[0] else str(file)
    yield from ((key, source) for key in flat(body, f"{package}." if package else ""))
