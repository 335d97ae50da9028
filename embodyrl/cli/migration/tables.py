"""What is known of another system, as data: its keys, its defaults, what its experiments are, what decides them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from embodyrl.config.settings import spell
from embodyrl.errors import ConfigError

FOLDER = files("embodyrl.cli").joinpath("migration")
PROGRAM = "(program)"
"""Stands for what a shell script starts, where conditions name keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system. Its files lie in migration/<folder>/."""

    folder: str
    keys: Mapping[str, Any]
    """name, version, kinds; keys, "not needed" and "unsupported"."""
    identity: list[Mapping[str, Any]]
    """Questions whose answers choose our parts, or say that there are none."""
    defaults: Mapping[str, Any]
    """What the system's version takes where a file says nothing, by key; below (groups): files of its own."""
    facts: Mapping[str, Any]
    """Expressions of its keys for what decides a result."""

    @property
    def name(self) -> str:
        """As its authors write it."""
        return self.keys["name"]


@cache
def read(*parts: str) -> Any:
    """Read a file of the package."""
    text = FOLDER.joinpath(*parts).read_text(encoding="utf-8")
    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is libyaml
    return safe(text).get_single_data()


def systems() -> list[str]:
    """Folders of the systems that are known."""
    return sorted(entry.name for entry in FOLDER.iterdir() if entry.joinpath("keys.yaml").is_file())


def load_system(folder: str) -> System:
    """Read a system.

    Raises:
        ConfigError: it is not known.
    """
    if folder not in systems():
        raise ConfigError(f"--from {folder}: one of {', '.join(systems())}.")
    parts = {name: read(folder, f"{name}.yaml") for name in ("keys", "identity", "defaults", "facts")}
    return System(folder=folder, **parts)


def detect(values: Mapping[str, Any]) -> str:
    """Find the system whose table knows most of the keys.

    Raises:
        ConfigError: none knows a third of them.
    """
    known = {}
    for system in systems():
        table = read(system, "keys.yaml")
        fitting = "signs" not in table or any(key in values for key in table["signs"])
        known[system] = sum(find(table, key)[0] != "unknown" for key in values) if fitting else 0
    best = max(known, key=lambda system: known[system])
    if known[best] * 3 < len(values) or not values:
        raise ConfigError(f"this is no config of {', '.join(systems())}: too few of its keys are known; see --from.")
    return best


def find(table: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """Return the state of a key and what the table says about it."""
    if key in table["keys"]:
        return "mapped", table["keys"][key]
    for state in ("not needed", "unsupported"):
        for why, patterns in table[state].items():
            if fits(key, patterns):
                return state, why
    return "unknown", f"the reference of {table['name']} has no such key"


def fits(key: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns (*, ?, {a,b}) is this key."""
    return any(_compiled(pattern)(key) for pattern in patterns)


@cache
def _compiled(pattern: str) -> Any:
    parts = _braces(pattern)
    return lambda key: any(fnmatchcase(key, part) for part in parts)


def _braces(pattern: str) -> list[str]:
    """Expand {a,b} wherever it stands."""
    match = re.match(r"(.*?)\{(.*?)\}(.*)", pattern)
    if match is None:
        return [pattern]
    return [f"{match[1]}{part}{rest}" for part in match[2].split(",") for rest in _braces(match[3])]


def holds(when: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether all conditions hold: patterns of a key's value, in lower case.

    Null is `none` and a missing key `absent`, which no pattern with * or ? fits. A key with `*` stands for every key
    that it fits, of which one must have such a value.
    """
    return all(_one_holds(key, wanted, values) for key, wanted in when.items())


def _one_holds(key: str, wanted: Any, values: Mapping[str, Any]) -> bool:
    patterns = [str(one).lower() for one in (wanted if isinstance(wanted, list) else [wanted])]
    names = [name for name in values if fnmatchcase(name, key)] if "*" in key else [key]
    said = [_said(values, name) for name in names] or ["absent"]
    nothing = ("absent", "none")
    return any(
        value in patterns if value in nothing else any(fnmatchcase(value, pattern) for pattern in patterns)
        for value in said
    )


def _said(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    value = values[name]
    return "none" if value is None or value == "" else spell(value).lower()
