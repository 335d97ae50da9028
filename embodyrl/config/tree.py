"""The YAML tree: which groups conf/ has, their options, and what each option says about itself."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodyrl.config.paths import conf_dir
from embodyrl.errors import ConfigError

_YAML_LIMIT = 1 << 20
"""Characters of a saved config."""


def search_path(config_dirs: Sequence[Path] = ()) -> list[Path]:
    """The folders in which options are looked up: shipped first, then the user's.

    Raises:
        ConfigError: a folder does not exist.
    """
    missing = [d for d in config_dirs if not d.is_dir()]
    if missing:
        raise ConfigError([f"--config-dir {d}: no such folder; create it or fix the path." for d in missing])
    return [conf_dir(), *(d.resolve() for d in config_dirs)]


def root_file(command: str) -> str:
    """Name of the file that composes a command: its own, or the one of `train`."""
    return command if (conf_dir() / f"{command}.yaml").is_file() else "train"


@functools.cache
def default_options(command: str) -> dict[str, str | None]:
    """Groups of a command in order, with the option that its root file selects.

    What follows from other groups (`optional start: ...`) is no group to choose from.
    """
    raw = yaml.safe_load((conf_dir() / f"{root_file(command)}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in raw["defaults"] if isinstance(entry, dict)]
    return {group: option for e in entries for group, option in e.items() if not group.startswith("optional ")}


def options(group: str, config_dirs: Sequence[Path] = ()) -> dict[str, Path]:
    """Options of a group by name (`text/gsm` for a file in a subfolder), with their files."""
    found: dict[str, Path] = {}
    for folder in search_path(config_dirs):
        base = folder / group
        for file in sorted(base.rglob("*.yaml")):
            found.setdefault(file.relative_to(base).with_suffix("").as_posix(), file)
    return dict(sorted(found.items()))


def one_line(file: Path) -> str:
    """What a YAML file says about itself: its first comment line that is no directive."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").strip()
        if text and not text.startswith("@"):
            return text
    return ""


def read_plain_yaml(file: Path) -> dict[Any, Any]:
    """Read YAML that holds nothing but mappings, lists and scalars.

    Raises:
        ConfigError: broken YAML, an explicit tag such as `!!python/object`, an alias (a few can stand for
            gigabytes), a huge file, or no mapping at the top.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if len(text) > _YAML_LIMIT:
            raise ConfigError(f"{file}: {len(text)} characters; a config has fewer than {_YAML_LIMIT}.")
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(
                    f"{file}:{event.start_mark.line + 1}: YAML aliases are refused (they can grow without bound)."
                )
            tag = getattr(event, "tag", None)
            if tag is not None:
                line = event.start_mark.line + 1
                raise ConfigError(f"{file}:{line}: YAML tag '{tag}' is refused (tags can run code); remove it.")
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text.strip() else {}
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: broken YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected `key: value` lines at the top; it is no saved config.")
    return raw
