"""Composition of a config with Hydra: `group=option` and `key=value` arguments, and the YAML files that they choose."""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.paths import PACKAGE, resolve_asset
from embodyrl.config.plain_yaml import is_yaml_only, read_plain_yaml
from embodyrl.errors import ConfigError, shorten
from embodyrl.registry import closest

COMMAND_LINE = "command line"
"""Source of settings from the command line."""
_MAX_OVERRIDE_CHARS = 4000
"""Maximum number of characters of one override."""
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with the value that a file or a command-line argument sets."""

    key: str
    value: Any
    source: str
    """`COMMAND_LINE`, or the path of the file that sets the value."""
    override: str = ""
    """Override as written by the user; empty for values from files."""

    @property
    def is_set_by_user(self) -> bool:
        """True if the command line sets the key."""
        return self.source == COMMAND_LINE

    @property
    def text(self) -> str | None:
        """Unparsed value from the command line, for keys of type str: 2026_11_24 must not become 20261124."""
        name, _, value = self.override.partition("=")
        return value.strip() if name == self.key else None

    @property
    def where(self) -> str:
        """Prefix of error messages that contains the source of the setting."""
        return f"{shorten(self.override)}: " if self.is_set_by_user else f"{self.source}: "


def compose(
    command: str,
    arguments: Sequence[str],
    config_dirs: Sequence[Path],
    problems: list[str],
    *,
    unused_groups: Container[str] = (),
    has_base_run: bool = False,
) -> tuple[dict[str, str], list[Setting], list[Setting]]:
    """Return the chosen option of each config group, the settings of the arguments, and the settings of the files.

    Arguments of the groups `unused_groups`, which have no options for this command, are returned as values.
    `has_base_run` is True if the saved config of a run is the base of the config. Invalid arguments are appended to
    `problems`.

    Raises:
        ConfigError: the files cannot be composed; the problems are included.
    """
    groups, overrides = split_overrides(command, arguments, config_dirs, problems)
    for group in [group for group in groups if group in unused_groups]:
        overrides.append(Setting(group, groups[group], COMMAND_LINE, f"{group}={groups.pop(group)}"))
    try:
        values = compose_groups(command, groups, config_dirs)
        # An experiment preset sets all values, also if the base is the config of a run.
        ignores_start = has_base_run and groups.get("experiment", "null") == "null"
        if ignores_start or _has_other_weights(values, overrides, config_dirs):
            values = compose_groups(command, groups | _get_start_override(command), config_dirs)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    return groups, overrides, values


def _get_start_override(command: str) -> dict[str, str]:
    return {"start": "none"} if "optional start" in _defaults(command) else {}


def _has_other_weights(values: Sequence[Setting], overrides: Sequence[Setting], config_dirs: Sequence[Path]) -> bool:
    """Return True if conf/start/ENV-MODEL.yaml sets `model.path`, but another file or the command line replaces it."""
    starts = {Path(setting.source) for setting in values if Path(setting.source).parent.name == "start"}
    folders = search_path(config_dirs)
    if not any("model.path" in dict(_list_keys(f"start/{file.stem}", folders)) for file in starts):
        return False
    path = next(setting for setting in values if setting.key == "model.path")
    paths = [s.value for s in overrides if s.key == "model.path" or (s.key == "ckpt" and s.value is not None)]
    if Path(path.source) not in starts or not isinstance(path.value, str):
        return True
    start_path = resolve_asset(path.value).resolve()
    return any(
        not isinstance(weights_path, str) or resolve_asset(weights_path).resolve() != start_path
        for weights_path in paths
    )


def split_overrides(
    command: str, arguments: Sequence[str], config_dirs: Sequence[Path], problems: list[str]
) -> tuple[dict[str, str], list[Setting]]:
    """Separate `group=option` from `key=value` arguments; append a message to `problems` for each invalid argument."""
    groups: dict[str, str] = {}
    settings: list[Setting] = []
    for argument in arguments:
        try:
            name, value = parse_override(argument)
        except ConfigError as error:
            problems += error.problems
            continue
        if name in default_options(command):
            if problem := _option_error(command, name, value, argument, config_dirs):
                problems.append(problem)
            else:
                groups[name] = "null" if value is None else str(value)
        else:
            try:
                settings += [Setting(key, leaf, COMMAND_LINE, argument) for key, leaf in flatten({name: value}).items()]
            except ConfigError as error:
                problems += [f"{shorten(argument)}: {problem}" for problem in error.problems]
    return groups, settings


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `name=value` with Hydra's grammar, and return the name and the typed value.

    >>> parse_override("actor.optim.lr=1e-4")
    ('actor.optim.lr', 0.0001)

    Raises:
        ConfigError: the argument has another form, or adds, removes or sweeps keys.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        if len(text.encode()) > 4 * _MAX_OVERRIDE_CHARS or len(text) > _MAX_OVERRIDE_CHARS:
            raise ValueError
        override = OverridesParser.create().parse_override(text)
        value = None if override.is_sweep_override() or override.is_delete() else override.value()
    except (HydraException, ValueError, RecursionError):
        raise ConfigError(
            f"Cannot parse '{shorten(text)}'. Write key=value or group=option without spaces, and quote special "
            f"characters: {_quoted_example(text)}."
        ) from None
    name = override.key_or_group
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise ConfigError(f"{shorten(text)}: keys are never added or removed ('+', '++', '~'); write {name}=VALUE.")
    if override.is_sweep_override():
        raise ConfigError(
            f"{shorten(text)}: one value per key; for a list write [a,b], for text with commas quote it: 'key=\"a,b\"'"
            f"; for one run for each value use embodyrl train -m {shorten(text)}."
        )
    if override.package is not None:
        raise ConfigError(f"{shorten(text)}: '@' is not supported; write {name}=...")
    if isinstance(value, str) and value and is_yaml_only(text_value := text.partition("=")[2].strip()):
        number = text_value.replace(".", "")
        raise ConfigError(f"{shorten(text)}: {text_value} is valid only in YAML. Write {name}={number}, or quote text.")
    return name, value


def _quoted_example(text: str) -> str:
    """Return the shell argument that sets a key to the text after `=`; for other arguments, an example."""
    name, _, value = text.partition("=")
    is_simple = re.fullmatch(r"[\w.]+", name) and re.fullmatch(r"[^'\"]+", value) and value.isprintable()
    return f"'{name}=\"{value}\"'" if is_simple and len(text) < 200 else "'key=\"a, b\"'"


def format_override(name: str, value: object) -> str:
    """Return the argument `name=value`, from which `parse_override` reads an equal value; text is quoted if necessary.

    >>> format_override("ckpt", "runs/a (1)"), format_override("env.kwargs.x", ["1e5", 2, None])
    ('ckpt="runs/a (1)"', 'env.kwargs.x=["1e5",2,null]')
    """
    from embodyrl.config.settings import format_value  # here, because `list` needs no pydantic

    return f"{name}={format_value(value, _quote)}"


def _quote(text: str) -> str:
    """Quote and escape text that `parse_override` would read as another value."""
    try:
        if text and parse_override(f"a=[{text}]") == ("a", [text]) and parse_override(f"a={text}") == ("a", text):
            return text
    except ConfigError:
        pass  # brackets, commas, an equals sign, ...
    escaped_text = re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + match[2].replace('"', r"\""), text)
    return f'"{escaped_text}"'


def _option_error(command: str, group: str, option: object, text: str, config_dirs: Sequence[Path]) -> str | None:
    known_options = options(group, config_dirs)
    nullable = default_options(command)[group] is None
    if (option is None and nullable) or (isinstance(option, str) and option in known_options):
        own_files = [file for folder in config_dirs if (file := folder.resolve() / group / f"{option}.yaml").is_file()]
        if own_files and known_options[str(option)] != own_files[0]:
            return (
                f"{shorten(text)}: {group} '{option}' is built in, so {own_files[0]} would be ignored; rename the file."
            )
        return None
    if not isinstance(option, str):
        return f"{shorten(text)}: {group} takes the name of one option: {', '.join(known_options)}."
    hint = closest(option, known_options)
    return f"{shorten(text)}: unknown {group} '{option}'.{hint} Available: {', '.join(known_options)}."


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings, such as a saved config, by dotted name; an empty mapping is a leaf.

    Raises:
        ConfigError: an inner name is empty, contains a dot, or is not text or an integer.
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if prefix and (type(key) not in (str, int) or not str(key) or "." in str(key)):
            raise ConfigError(f"{key!r} is not a name in {prefix[:-1]}. Use text without dots.")
        has_subkeys = isinstance(value, Mapping) and value
        leaves |= flatten(value, f"{prefix}{key}.") if has_subkeys else {f"{prefix}{key}": value}
    return leaves


def conf_dir() -> Path:
    """Return the folder with the YAML files of the config groups, in the installed package or the source checkout."""
    packaged = PACKAGE / "conf"
    return packaged if (packaged / "train.yaml").exists() else PACKAGE.parent / "conf"


def search_path(config_dirs: Sequence[Path] = ()) -> list[Path]:
    """Return the folders that contain option files: the included folder first, then the user's folders."""
    if missing := [folder for folder in config_dirs if not folder.is_dir()]:
        raise ConfigError([f"--config-dir {folder}: no such folder; create it or fix the path." for folder in missing])
    return [conf_dir(), *(folder.resolve() for folder in config_dirs)]


def root_file(command: str) -> str:
    """Return the name of a command's root file in conf/: `<command>` if the file exists, else `train`."""
    return command if (conf_dir() / f"{command}.yaml").is_file() else "train"


def default_options(command: str) -> dict[str, str | None]:
    """Return the config groups of a command in order, each with its default option (None: no option).

    Groups whose option is derived from other groups (`optional start: ...`) are left out.
    """
    return {group: option for group, option in _defaults(command).items() if not group.startswith("optional ")}


@functools.cache
def _defaults(command: str) -> dict[str, str | None]:
    raw = yaml.safe_load((conf_dir() / f"{root_file(command)}.yaml").read_text(encoding="utf-8"))
    return {group: option for entry in raw["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


def dir_flags(config_dirs: Sequence[Path]) -> list[str]:
    """Return the command-line flags that select these folders."""
    return [part for folder in config_dirs for part in ("--config-dir", str(folder))]


def options(group: str, config_dirs: Sequence[Path] = ()) -> dict[str, Path]:
    """Return the options of a group by name (`text/gsm` for a file in a subfolder), with their files."""
    files: dict[str, Path] = {}
    for folder in search_path(config_dirs):
        base = folder / group
        for file in sorted(base.rglob("*.yaml")):
            files.setdefault(file.relative_to(base).with_suffix("").as_posix(), file)
    for name in variants(group):
        files.setdefault(name, conf_dir() / "variants.yaml")
    return dict(sorted(files.items()))


@functools.cache
def variants(group: str) -> dict[str, tuple[str | None, str, dict[str, Any]]]:
    """Return the options of a group defined in `conf/variants.yaml`, each as (base option, description, values).

    For example libero_pro_10_swap is libero_10 with the suite libero_10_swap.
    """
    variants_by_name: dict[str, tuple[str | None, str, dict[str, Any]]] = {}
    for family, entry in read_plain_yaml(conf_dir() / "variants.yaml").get(group, {}).items():
        for name, description in entry.get("options", {}).items():
            values = {entry["key"]: name} | entry.get("all", {}) | entry.get("more", {}).get(name, {})
            variants_by_name[name] = entry.get("base"), description, values
        for base in entry.get("bases", ()):
            for axis, description in entry["axes"].items():
                name = f"{family}_{base.partition('_')[2]}_{axis}"
                variants_by_name[name] = (
                    base,
                    f"{entry['title']}: {base}, {description}",
                    {entry["key"]: f"{base}_{axis}"},
                )
    return variants_by_name


def compose_groups(command: str, groups: Mapping[str, str], config_dirs: Sequence[Path]) -> list[Setting]:
    """Return the unresolved values from the root file of a command and from the chosen group options."""
    folders = tuple(search_path(config_dirs))
    # Compositions of included files are cached, because these files do not change while the program runs.
    composed = compose_files if len(folders) > 1 else _compose_included
    try:
        return list(composed(root_file(command), tuple(groups.items()), folders))
    except ConfigError as error:
        options = ", ".join(f"{group}={option}" for group, option in groups.items())
        raise ConfigError(f"Cannot compose {options or command}: {error}") from None


def compose_files(root: str, options: tuple[tuple[str, str], ...], folders: tuple[Path, ...]) -> tuple[Setting, ...]:
    """Return the values from a root file and group options, with interpolations unresolved, each with its source file.

    `options` are options from the command line, which override the options of files. The first folder that
    contains a file has priority.

    Raises:
        ConfigError: a file or group does not exist, a file is not plain YAML, or Hydra cannot read a defaults list.
    """
    from hydra import compose as compose_by_hydra
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    groups = dict(options)
    included, *user_folders = (str(folder) for folder in folders)
    # Check the files before Hydra reads them, because Hydra expands aliases without a limit.
    for group, option in groups.items() if user_folders else ():
        try:
            deque(_list_keys(f"{group}/{option}", folders), maxlen=0)
        except RecursionError:
            raise ConfigError(f"the defaults of {group}={option} form a cycle; remove one entry.") from None
    # Hydra cannot override an option with null, but null is the default of the groups that accept null.
    _store_variants()
    arguments = [f"{group}={option}" for group, option in groups.items() if option != "null"]
    arguments += [f"hydra.searchpath={json.dumps([f'file://{folder}' for folder in user_folders])}"] * bool(
        user_folders
    )
    try:
        with _isolated_hydra(), initialize_config_dir(included, version_base="1.3"):
            cfg = compose_by_hydra(root, overrides=arguments, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    choices = dict(cfg.hydra.runtime.choices)
    if overridden := next((group for group, option in groups.items() if option == "null" and choices.get(group)), None):
        raise ConfigError(
            f"{overridden}=null has no effect: another option selects {overridden}={choices[overridden]}. Remove one."
        )
    with open_dict(cfg):
        del cfg.hydra
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    files = dict(_list_keys(root, folders))
    for entry in read_plain_yaml(folders[0] / f"{root}.yaml")["defaults"]:
        group = next(iter(entry)).removeprefix("optional ") if isinstance(entry, dict) else ""
        if choices.get(group) is not None:
            files |= dict(_list_keys(f"{group}/{choices[group]}", folders))
    default = f"{folders[0].name}/{root}.yaml"
    return tuple(Setting(key, value, files.get(key, default)) for key, value in flatten(values).items())


_compose_included = functools.cache(compose_files)


@functools.cache
def _store_variants() -> None:
    """Register variants, which are options without files, in Hydra's config store."""
    from hydra.core.config_store import ConfigStore

    for group in read_plain_yaml(conf_dir() / "variants.yaml"):
        for name, (base, _, values) in variants(group).items():
            node = {"defaults": [*([base] if base else []), "_self_"], **values}
            ConfigStore.instance().store(name=name, node=node, group=group, provider="embodyrl")


@contextmanager
def _isolated_hydra() -> Iterator[None]:
    """Clear Hydra's global state inside the block, then restore the state of another Hydra application."""
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    previous = GlobalHydra.instance().hydra
    added_resolvers = [name for name in ("hydra", "now", "python_version") if not OmegaConf.has_resolver(name)]
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = previous
        for name in added_resolvers:
            OmegaConf.clear_resolver(name)


def _list_keys(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (key, name of the file that sets the key) for a file and the files in its defaults list."""
    folder = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    group, _, option = name.rpartition("/")
    if folder is None:
        base, _, values = variants(group).get(option, (None, "", {}))
        if base:
            yield from _list_keys(f"{group}/{base}", folders)
        yield from ((key, f"{folders[0].name}/{name}") for key in flatten(values, f"{group}."))
        return
    file = folder / f"{name}.yaml"
    body = read_plain_yaml(file)
    defaults = body.pop("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}: defaults must be a list, for example `defaults: [base]`.")
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            yield from _list_keys(f"{group}/{entry}" if group else entry, folders)
    match = _PACKAGE.match(file.read_text(encoding="utf-8"))
    package = group.replace("/", ".") if match is None else match[1].removeprefix("_global_")
    source = f"{folder.name}/{name}.yaml" if folder == folders[0] else str(file)
    yield from ((key, source) for key in flatten(body, f"{package}." if package else ""))
