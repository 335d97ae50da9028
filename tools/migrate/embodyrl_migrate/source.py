"""Readers of configs: TOML, YAML with Hydra's defaults lists, shell scripts. No code is executed."""

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodyrl_migrate.shell import read_shell
from embodyrl_migrate.tables import MigrationError

MAX_BYTES = 4 * 2**20
"""Maximum size of a config in bytes."""
MAX_FILES = 200
"""Maximum number of files in all defaults lists."""
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "multiply": lambda a, b: a * b,
    "int_div": lambda a, b: a // b,
    "divide": lambda a, b: a / b,
    "subtract": lambda a, b: a - b,
    "add": lambda a, b: a + b,
    "not": lambda a: not a,
}
"""Functions that RLinf's configs use in interpolations."""


@dataclass(slots=True, kw_only=True)
class Source:
    """A config before its translation."""

    values: dict[str, Any]
    """Values by dotted key; an interpolation that cannot be resolved stays as text."""
    program: str = ""
    """Program that the shell script starts, for example verl.trainer.main_ppo."""
    missing: list[str] = field(default_factory=list)
    """Files in the config that were not found."""
    unclear: list[str] = field(default_factory=list)
    """Values that depend on arguments of the script or on the machine."""
    notes: list[str] = field(default_factory=list)


def read_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Read a config and apply `overrides` in Hydra's syntax (key=value, +key=value, ~key).

    Raises:
        MigrationError: the file is missing or not a readable config.
    """
    if not path.is_file():
        raise MigrationError(f"{path}: no such file.")
    if path.stat().st_size > MAX_BYTES:
        raise MigrationError(f"{path}: not readable: larger than {MAX_BYTES >> 20} MiB.")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".sh", ".bash") or text.startswith("#!"):
            return _read_script(path, text, overrides)
        source = Source(values={})
        raw = OmegaConf.create(tomllib.loads(text)) if path.suffix == ".toml" else _Composer(path, source).compose()
        _apply_overrides(raw, overrides)
        for name, function in _ARITHMETIC.items():
            OmegaConf.register_new_resolver(name, function, replace=True)
        source.values = _flatten(raw)
    except (OSError, yaml.YAMLError, ValueError, OmegaConfBaseException, RecursionError) as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else str(error).partition("\n")[0]
        raise MigrationError(f"{path}: not readable: {reason}") from error
    return source


def _read_script(path: Path, text: str, overrides: Sequence[str]) -> Source:
    """Return the overrides of the command in a script, applied to the file of its flag --config, if any."""
    script = read_shell(text)
    if not script.overrides and script.config is None:
        raise MigrationError(
            f"{path}: not readable: the script starts no training with key=value overrides or --config FILE."
        )
    source = Source(values={}, program=script.program, unclear=script.unclear)
    if script.config is not None:
        # What a command such as $(pwd) would print is unknown: the rest is looked for in the folders above.
        name = re.sub(r"^\$\{?\w+\}?/", "", script.config)
        candidates = [parent / name for parent in (path.parent, *path.parent.resolve().parents)]
        config_path = next((file for file in candidates if file.is_file()), None)
        if config_path is not None:
            inner = read_source(config_path, [*script.overrides, *overrides])
            inner.program, inner.unclear = script.program, [*script.unclear, *inner.unclear]
            return inner
        if not script.overrides:
            raise MigrationError(f"{path}: the script starts {script.config}, which was not found. Give that file.")
        source.missing.append(script.config)
    raw = OmegaConf.create({})
    _apply_overrides(raw, [*script.overrides, *overrides])
    source.values = _flatten(raw)
    return source


def _apply_overrides(raw: DictConfig, overrides: Sequence[str]) -> None:
    for override in overrides:
        if override.startswith("~"):
            _remove(raw, override[1:].partition("=")[0])
            continue
        key, separator, value = override.lstrip("+").partition("=")
        if not separator:
            raise MigrationError(f"'{override}': arguments after the file must be overrides, key=value.")
        key = key.partition("@")[0]
        try:
            parsed = OmegaConf.create(f"v: {value}").v
        except (yaml.YAMLError, OmegaConfBaseException):
            parsed = value  # text with a colon, a percent sign, ...
        OmegaConf.update(raw, key, parsed, force_add=True)


def _remove(raw: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(raw, parent) if parent else raw
    if isinstance(node, DictConfig) and name in node:
        del node[name]


class _Composer:
    """Composer of Hydra's defaults lists; missing files are recorded and are no error."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path = path
        self._source = source
        self._files = 0
        self._roots = [path.parent]

    def compose(self) -> DictConfig:
        raw = self._load(self._path)
        for search_path in OmegaConf.to_container(raw, resolve=False).get("hydra", {}).get("searchpath", []) or []:  # pyright: ignore
            # RLinf's ${oc.env:EMBODIED_PATH} is the folder above its configs.
            resolved = re.sub(r"\$\{oc\.env:\w+(,[^}]*)?\}", str(self._path.parent.resolve().parent), str(search_path))
            self._roots.append(Path(resolved.removeprefix("file://")))
        return self._merge_defaults(raw, self._path, "")

    def _load(self, path: Path) -> DictConfig:
        self._files += 1
        if self._files > MAX_FILES:
            raise MigrationError(f"{self._path}: its defaults lists contain more than {MAX_FILES} files.")
        raw = OmegaConf.load(path)
        if not isinstance(raw, DictConfig):
            raise MigrationError(f"{path}: not readable: it contains a list, not keys.")
        return raw

    def _merge_defaults(self, raw: DictConfig, path: Path, package: str) -> DictConfig:
        """Merge a file's defaults and then the file below `package`, unless _self_ has another position."""
        merged = OmegaConf.create({})
        entries = OmegaConf.to_container(raw.get("defaults", OmegaConf.create([])), resolve=False)
        primary = path == self._path
        own_keys = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "defaults" or primary])
        assert isinstance(entries, list)
        for entry in [*entries, *([] if "_self_" in entries else ["_self_"])]:
            if entry == "_self_":
                merged.merge_with(_nest(package, own_keys))
                continue
            for name, target_package in _parse_entry(entry):
                self._merge_entry(merged, name, target_package, path, package)
        return merged

    def _merge_entry(self, merged: DictConfig, name: str, target_package: str | None, path: Path, package: str) -> None:
        file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
        group = ".".join(part for part in name.lstrip("/").split("/")[:-1] if part != "..")
        inner = {None: group, "_here_": "", "_global_": ""}.get(target_package, target_package) or ""
        below = inner if target_package == "_global_" else ".".join(part for part in (package, inner) if part)
        relative = [path.parent / file] if not name.startswith("/") else []
        for candidate in [*relative, *(root / file.lstrip("/") for root in self._roots)]:
            if candidate.is_file():
                declaration = re.match(r"\s*#\s*@package\s+(\S+)", candidate.read_text(encoding="utf-8"))
                at_root = declaration is not None and declaration[1] == "_global_" and target_package is None
                merged.merge_with(self._merge_defaults(self._load(candidate), candidate, "" if at_root else below))
                return
        self._source.missing.append(name.lstrip("/"))


def _parse_entry(entry: Any) -> list[tuple[str, str | None]]:
    """Return the files of one entry of a defaults list, each with its package or None."""
    if isinstance(entry, str):
        name, separator, package = entry.partition("@")
        return [(name, package if separator else None)]
    pairs = []
    for group, option in entry.items() if isinstance(entry, dict) else ():
        parts = str(group).split()
        if parts[0] == "override" or option is None:
            continue
        name, separator, package = parts[-1].partition("@")
        options = option if isinstance(option, list) else [option]
        pairs += [(f"{name}/{item}", package if separator else None) for item in options]
    return pairs


def _nest(package: str, raw: DictConfig) -> DictConfig:
    if not package:
        return raw
    nested = OmegaConf.create({})
    OmegaConf.update(nested, package, raw, force_add=True)
    return nested


def _flatten(raw: Any) -> dict[str, Any]:
    """Return the values by dotted key; an interpolation that cannot be resolved stays as text."""
    leaves: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for name in node:
            key = f"{prefix}{name}"
            try:
                value = node[name]
                if OmegaConf.is_config(value) and not OmegaConf.is_dict(value):
                    value = OmegaConf.to_container(value, resolve=True)
            except (OmegaConfBaseException, TypeError, ArithmeticError, RecursionError):
                value = dict(OmegaConf.to_container(node, resolve=False))[name]  # pyright: ignore
            if isinstance(value, DictConfig) and len(value):
                walk(value, f"{key}.")
            else:
                leaves[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    walk(raw, "")
    return leaves
