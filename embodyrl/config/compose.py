"""Compose the YAML files of conf/ and of `--config-dir` by Hydra."""

import functools
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.paths import conf_dir
from embodyrl.config.settings import flat
from embodyrl.config.tree import read_plain_yaml, root_file, search_path, variants
from embodyrl.config.words import Setting
from embodyrl.errors import ConfigError

_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


def compose(command: str, groups: Mapping[str, str], config_dirs: Sequence[Path]) -> list[Setting]:
    """Return the values set by the files of a command and of options of groups, unresolved; later values win.

    Raises:
        ConfigError: one line; see `compose_files`.
    """
    folders = tuple(search_path(config_dirs))
    # What ships does not change while the program runs.
    composed = compose_files if len(folders) > 1 else _compose_shipped
    try:
        return list(composed(root_file(command), tuple(groups.items()), folders))
    except ConfigError as error:
        options = ", ".join(f"{group}={option}" for group, option in groups.items())
        raise ConfigError(f"Cannot compose {options or command}: {error}") from None


def compose_files(root: str, typed: tuple[tuple[str, str], ...], folders: tuple[Path, ...]) -> tuple[Setting, ...]:
    """Return the leaves that a root file and options of groups set, unresolved, each with the file that set it last.

    Args:
        root: name of the file with the defaults list.
        typed: options of groups from the command line; they override the options of files.
        folders: search folders; the first folder with a file wins.

    Raises:
        ConfigError: no such file or group, a file that is not plain YAML, or a defaults list that Hydra cannot read.
    """
    from hydra import compose as compose_by_hydra
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    groups = dict(typed)
    shipped, *more = (str(folder) for folder in folders)
    # Before Hydra reads them: Hydra expands aliases without a limit.
    for group, option in groups.items() if more else ():
        try:
            deque(_keys_of(f"{group}/{option}", folders), maxlen=0)
        except RecursionError:
            raise ConfigError(f"the defaults of {group}={option} form a cycle; remove one of them.") from None
    # Hydra cannot override an option by none; null is the default of the groups that take it.
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
        raise ConfigError(f"{wrong}=null: another option chooses {wrong}={choices[wrong]}; choose a different one.")
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
    """Register the options without files."""
    from hydra.core.config_store import ConfigStore

    for group in read_plain_yaml(conf_dir() / "variants.yaml"):
        for name, variant in variants(group).items():
            node = {"defaults": [variant.base, "_self_"], **variant.values}
            ConfigStore.instance().store(name=name, node=node, group=group, provider="embodyrl")


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Keep the state of a Hydra application that runs in this process."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton

    state = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        Singleton.set_state(state)


def _keys_of(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the keys that a file and the files of its defaults set, each with the name of the file."""
    folder = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    group, _, option = name.rpartition("/")
    if folder is None:
        if variant := variants(group).get(option):
            yield from _keys_of(f"{group}/{variant.base}", folders)
            yield from ((f"{group}.{key}", f"{folders[0].name}/{name}") for key in variant.values)
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
