"""The YAML tree: which groups conf/ has, their options, and which files the choice of some composes."""

import functools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.paths import conf_dir
from embodyrl.errors import ConfigError
from embodyrl.registry import closest

_YAML_LIMIT = 1 << 20
"""Bytes of a saved config."""
_YAML_DEPTH = 100
_MOST_ROUNDS = 20
_PACKAGE = re.compile(r"(?:#.*\n|[ \t]*\n)*#\s*@package\s+(\S+)")
"""In the comments that a file begins with, as Hydra has it."""
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """YAML of settings: 1e-4 is a number, a date is text, and a key stands in its mapping once."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is there twice", node.start_mark)
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


def default_options(command: str) -> dict[str, str | None]:
    """Groups of a command in order, with the option that its root file selects.

    What follows from other groups (`optional start: ...`) is no group to choose from.
    """
    return {group: option for group, option in _defaults(command).items() if not group.startswith("optional ")}


def follows(command: str, group: str) -> bool:
    """Whether options of the group follow from others in a command."""
    return f"optional {group}" in _defaults(command)


@functools.cache
def _defaults(command: str) -> dict[str, str | None]:
    raw = yaml.safe_load((conf_dir() / f"{root_file(command)}.yaml").read_text(encoding="utf-8"))
    return {group: option for entry in raw["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


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
        if (size := file.stat().st_size) > _YAML_LIMIT:
            raise ConfigError(f"{file}: {size} bytes; a config has fewer than {_YAML_LIMIT}.")
        text = file.read_text(encoding="utf-8")
        depth = 0
        # On the events, before any object is made: deep nesting, aliases and tags are refused without their cost.
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _YAML_DEPTH:
                raise ConfigError(f"{file}: more than {_YAML_DEPTH} levels; it is no saved config.")
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(
                    f"{file}:{event.start_mark.line + 1}: YAML aliases are refused (they can grow without bound)."
                )
            tag = getattr(event, "tag", None)
            if tag is not None:
                line = event.start_mark.line + 1
                raise ConfigError(f"{file}:{line}: YAML tag '{tag}' is refused (tags can run code); remove it.")
        raw = _Loader(text).get_single_data() or {}
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: broken YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected `key: value` lines at the top; it is no saved config.")
    return raw


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a composition, in the order of reading: later ones win."""

    file: Path
    name: str
    """Its path in its folder."""
    package: str
    """Dotted name that its keys lie below; empty: they are whole."""
    body: Mapping[Any, Any]


def compose_files(root: str, groups: Mapping[str, str], folders: Sequence[Path]) -> list[Part]:
    """Find the files that a root file and the choices of groups stand for.

    A file is read after those of its `defaults`, or where these say `_self_`. Their entries are `_self_`, `file`,
    `group: option`, `optional group: option` (`${group}` is what was chosen there) and `override /group: option`,
    as in Hydra. Names are relative to the file's folder, or begin with /.

    Args:
        root: name of the file to begin with.
        groups: typed choices; they win over those of files.
        folders: where files are looked up, the first that has one counts.

    Raises:
        ConfigError: a file or group that is not there, an entry of another form.
    """
    choices = _Choices(dict(groups), folders)
    for _ in range(_MOST_ROUNDS):  # a file may choose other files, which may choose again
        before = dict(choices.chosen)
        choices.groups = {}
        parts = list(choices.read(root, ""))
        if choices.chosen == before and choices.resolved == choices.groups:
            break
        choices.resolved = choices.groups
    else:
        raise ConfigError(f"{root}.yaml: its groups choose each other in a circle (`${{group}}` in defaults).")
    if unused := [group for group in choices.chosen if group not in choices.groups]:
        raise ConfigError(
            f"{unused[0]}={choices.chosen[unused[0]]}: no such group.{closest(unused[0], choices.groups)}"
        )
    return parts


@dataclass(slots=True)
class _Choices:
    """Options that were typed or are overridden, and those of the groups met while reading."""

    chosen: dict[str, str]
    folders: Sequence[Path]
    groups: dict[str, str | None] = field(default_factory=dict)
    resolved: dict[str, str | None] = field(default_factory=dict)

    def read(self, name: str, package: str, above: tuple[str, ...] = ()) -> Iterator[Part]:
        file = next((file for folder in self.folders if (file := folder / f"{name}.yaml").is_file()), None)
        if file is None:
            raise ConfigError(f"{above[-1] if above else name}: there is no {name}.yaml.")
        if name in above:
            raise ConfigError(f"{name}.yaml is among its own defaults.")
        raw = read_plain_yaml(file)
        if match := _PACKAGE.match(file.read_text(encoding="utf-8")):
            package = "" if match[1] == "_global_" else match[1]
        part = Part(file, name, package, {key: value for key, value in raw.items() if key != "defaults"})
        entries = raw.get("defaults") or []
        if not isinstance(entries, list):
            raise ConfigError(f"{file}: defaults must be a list.")
        # What a file overrides wins over what the files it builds on override: it is noted before they are read.
        entries = sorted(entries, key=lambda entry: not str(entry).startswith("{'override "))
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            if entry == "_self_":
                yield part
            else:
                yield from self._follow(entry, file, (*above, name))

    def _follow(self, entry: Any, file: Path, above: tuple[str, ...]) -> Iterator[Part]:
        here = above[-1].rpartition("/")[0]
        if isinstance(entry, str):
            name = _absolute(entry, here)
            yield from self.read(name, name.rpartition("/")[0].replace("/", "."), above)
            return
        said, option = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
        *marks, group = str(said).split() or [""]
        if marks not in ([], ["optional"], ["override"]) or "@" in group or not isinstance(option, str | None):
            raise ConfigError(
                f"{file}: cannot read '{entry}' in defaults; write `group: option` or `override /group: option`."
            )
        group = _absolute(group, here)
        if marks == ["override"]:
            self.chosen.setdefault(group, option or "null")
            return
        option = re.sub(r"\$\{([\w/]+)\}", lambda match: self.resolved.get(match[1]) or "", option or "") or None
        option = self.chosen.get(group, option)
        self.groups[group] = option
        if option in (None, "null") or (
            marks and not any((d / group / f"{option}.yaml").is_file() for d in self.folders)
        ):
            return
        yield from self.read(f"{group}/{option}", group.replace("/", "."), above)


def _absolute(name: str, here: str) -> str:
    return name[1:] if name.startswith("/") else f"{here}/{name}".lstrip("/")
