"""Config groups and their options in the YAML files of conf/, and a safe loader of plain YAML."""

import functools
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.paths import conf_dir
from embodyrl.errors import ConfigError

_YAML_LIMIT = 1 << 20
"""Maximum size of a saved config, in bytes."""
_YAML_DEPTH = 100
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """YAML loader for settings: 1e-4 is a number, a date is a string, and duplicate keys are errors."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"key '{twice}' occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.[\d_]+([eE][-+]?\d+)?|\.(inf|Inf|INF))$"
        r"|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def search_path(config_dirs: Sequence[Path] = ()) -> list[Path]:
    """Return the folders that contain option files: the included folder first, then the user's folders.

    Raises:
        ConfigError: a folder does not exist.
    """
    missing = [d for d in config_dirs if not d.is_dir()]
    if missing:
        raise ConfigError([f"--config-dir {d}: no such folder; create it or fix the path." for d in missing])
    return [conf_dir(), *(d.resolve() for d in config_dirs)]


def root_file(command: str) -> str:
    """Return the name of a command's root file in conf/: `<command>` if the file exists, else `train`."""
    return command if (conf_dir() / f"{command}.yaml").is_file() else "train"


def default_options(command: str) -> dict[str, str | None]:
    """Return the config groups of a command in order, each with its default option (None: no option).

    Groups whose option is derived from other groups (`optional start: ...`) are left out.
    """
    return {group: option for group, option in _defaults(command).items() if not group.startswith("optional ")}


def follows(command: str, group: str) -> bool:
    """Return True if the option of a group is derived from the options of other groups."""
    return f"optional {group}" in _defaults(command)


@functools.cache
def _defaults(command: str) -> dict[str, str | None]:
    raw = yaml.safe_load((conf_dir() / f"{root_file(command)}.yaml").read_text(encoding="utf-8"))
    return {group: option for entry in raw["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


def options(group: str, config_dirs: Sequence[Path] = ()) -> dict[str, Path]:
    """Return the options of a group by name (`text/gsm` for a file in a subfolder), with their files."""
    found: dict[str, Path] = {}
    for folder in search_path(config_dirs):
        base = folder / group
        for file in sorted(base.rglob("*.yaml")):
            found.setdefault(file.relative_to(base).with_suffix("").as_posix(), file)
    for name in variants(group):
        found.setdefault(name, conf_dir() / "variants.yaml")
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Variant:
    """Group option without a YAML file, defined by values that override an optional base option."""

    base: str | None
    about: str
    values: dict[str, Any]


@functools.cache
def variants(group: str) -> dict[str, Variant]:
    """Return the variants of a group by name (`conf/variants.yaml`).

    For example libero_pro_10_swap is libero_10 with the suite libero_10_swap.
    """
    found: dict[str, Variant] = {}
    for family, of in read_plain_yaml(conf_dir() / "variants.yaml").get(group, {}).items():
        for name, about in of.get("options", {}).items():
            values = {of["key"]: name} | of.get("all", {}) | of.get("more", {}).get(name, {})
            found[name] = Variant(of.get("base"), about, values)
        for base in of.get("bases", ()):
            for axis, about in of["axes"].items():
                name = f"{family}_{base.partition('_')[2]}_{axis}"
                found[name] = Variant(base, f"{of['title']}: {base}, {about}", {of["key"]: f"{base}_{axis}"})
    return found


def about(group: str, option: str, file: Path) -> str:
    """Return the one-line description of a group option for help texts."""
    variant = variants(group).get(option)
    return one_line(file) if variant is None else variant.about


def one_line(file: Path) -> str:
    """Return the description of a YAML file: the first comment line other than `# @package ...`."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").strip()
        if text and not text.startswith("@"):
            return text
    return ""


def read_plain_yaml(file: Path) -> dict[Any, Any]:
    """Read YAML that contains only mappings, lists and scalars.

    Raises:
        ConfigError: the file is malformed or too large, is not a mapping, or contains a tag such as
            `!!python/object` or an alias (which can expand to gigabytes).
    """
    try:
        if (size := file.stat().st_size) > _YAML_LIMIT:
            raise ConfigError(f"{file} has {size} bytes; a config has at most {_YAML_LIMIT} bytes.")
        text = file.read_text(encoding="utf-8")
        depth = 0
        # Check parser events before objects are built, so that deep nesting and aliases use no memory.
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _YAML_DEPTH:
                raise ConfigError(f"{file} has more than {_YAML_DEPTH} nested levels. Use another file.")
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(
                    f"{file}:{event.start_mark.line + 1}: YAML aliases are refused (unbounded size); remove them."
                )
            tag = getattr(event, "tag", None)
            if tag is not None:
                line = event.start_mark.line + 1
                raise ConfigError(f"{file}:{line}: YAML tag '{tag}' is refused (tags can run code); remove it.")
        raw = _Loader(text).get_single_data() or {}
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}. Correct the file.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is not a config; write `key: value` lines.")
    return raw
