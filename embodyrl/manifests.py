"""Extensions of this package, declared in the files `extension.toml` of their folders."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).parent
FOLDERS = ("extensions", "envs", "policies")
"""Folders of the package whose subfolders may be extensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Optional part of the package, which can be removed by deleting its folders."""

    summary: str
    guide: str
    """Path of the extension's page in the manual, relative to docs/."""
    paths: tuple[str, ...]
    """All folders and files of the extension, relative to the package."""
    imports: tuple[str, ...] = ()
    """Names of extensions that this extension may import."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Required modules that are not dependencies of the core, each with the pip extra that installs the module."""
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Entry points as {group: {name: `package.module:attr`}}, as in the `pyproject.toml` of a package."""

    def install_line(self) -> str:
        """Return the command that installs missing dependencies, or an empty string."""
        extras = sorted({extra for module, extra in self.requires.items() if find_spec(module) is None})
        return f"pip install 'embodyrl[{','.join(extras)}]'" if extras else ""


@functools.cache
def extensions() -> Mapping[str, Extension]:
    """Return all extensions by name (the name of the folder)."""
    found: dict[str, Extension] = {}
    for file in sorted(file for folder in FOLDERS for file in PACKAGE.glob(f"{folder}/*/extension.toml")):
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
        paths = (file.parent.relative_to(PACKAGE).as_posix(), *raw.pop("paths", ()))
        points = raw.pop("entry-points", {})
        found[file.parent.name] = Extension(
            paths=paths, entry_points=points, imports=tuple(raw.pop("imports", ())), **raw
        )
    return found


def declared(group: str) -> Mapping[str, str]:
    """Return the entry points {name: target} of a group that extensions declare."""
    return {
        n: value for extension in extensions().values() for n, value in extension.entry_points.get(group, {}).items()
    }
