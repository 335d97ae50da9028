"""Commands of `embodyrl`, read from the commands.toml files of this folder and of extensions."""

import shutil
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.manifests import PACKAGE, extensions
from embodyrl.registry import installed

GROUP, FILE = "embodyrl.commands", "commands.toml"


def _open(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / FILE).read_text(encoding="utf-8"))


_SURFACE = _open(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command such as `embodyrl train`, with its function, flags and help texts."""

    target: str
    """`module:function` that receives the parsed arguments and returns the exit code; default: the target of the entry
    point."""
    summary: str
    usage: str
    words: str = "override"
    words_help: str = "group=option or key=value"
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keyword arguments of `argparse.add_argument` by flag, for example `--json`."""
    examples: tuple[str, ...] = ()
    long_help: bool = False
    """If True, the help contains config groups and common keys."""
    own_flags: bool = False
    """If True, the command parses its own flags: all arguments are passed on unparsed."""

    def epilog(self) -> str:
        """Return the text after the flags in `--help`."""
        text = "examples:\n" + "\n".join(f"  {e}" for e in self.examples) if self.examples else ""
        if self.long_help:
            text += "\n\n" + _groups_and_keys()
        return text


def _read(surface: Mapping[str, Any], targets: Mapping[str, str]) -> dict[str, Command]:
    """Return the commands of a parsed commands.toml; `targets` contains the default target of each command."""
    known, found = _SURFACE["flags"] | surface.get("flags", {}), {}
    for name, raw in surface["commands"].items():
        flags = {f"--{flag}": dict(known[flag]) for flag in raw.get("flags", ())}
        for options in flags.values():
            if options.get("metavar") in ("DIR", "FILE", "PATH"):
                options["type"] = Path
        changed = {"flags": flags, "examples": tuple(raw["examples"])}
        found[name] = Command(**{"target": targets.get(name, "")} | raw | changed)
    return found


def _of_extensions() -> dict[str, Command]:
    found = _read(_SURFACE, {})
    for extension in extensions().values():
        if targets := extension.entry_points.get(GROUP):
            found |= _read(_open(PACKAGE / extension.paths[0]), targets)
    first = [name for name in _SURFACE["first"] if name in found]
    return {name: found[name] for name in [*first, *sorted(found.keys() - first)]}


COMMANDS = _of_extensions()
"""Commands of the core and of extensions by name, the most common commands first."""


def of_packages() -> dict[str, Command]:
    """Return the commands of other installed packages, whose functions parse their own arguments."""
    return {
        entry.name: Command(
            target=entry.value,
            summary=f"Command of the package {entry.dist.name if entry.dist else entry.module}.",
            usage=f"embodyrl {entry.name} ...",
            words_help="arguments of the command",
            own_flags=True,
        )
        for entry in installed(group=GROUP)
        if entry.name not in COMMANDS
    }


def overview() -> str:
    """Return the text of `embodyrl --help`."""
    every = COMMANDS | of_packages()
    first = {name: every.pop(name) for name in _SURFACE["first"] if name in every}
    width = max(map(len, [*first, *every]))
    return _SURFACE["overview"].format(first=_table(first, width), more=_table(every, width))


def _table(commands: Mapping[str, Command], width: int) -> str:
    columns = _columns()
    return "\n".join(
        textwrap.fill(f"  {name:<{width}}  {command.summary}", columns, subsequent_indent=" " * (width + 4))
        for name, command in commands.items()
    )


def _columns() -> int:
    """Return the width of help texts in characters: argparse's width, with an upper limit for readability."""
    return min(120, shutil.get_terminal_size().columns - 2)


def _groups_and_keys() -> str:
    """Return the sections "groups" and "common keys" of the help of commands such as `train`."""
    from embodyrl.cli.output import about
    from embodyrl.config import compose
    from embodyrl.config.settings import spell
    from embodyrl.plan.keys import all_keys

    lines, columns = ["groups (group=option; * = default):"], _columns()
    for group, default in compose.default_options("train").items():
        lines.append(f"  {group}")
        found = compose.options(group)
        width = max(map(len, found))
        for option, file in found.items():
            mark = "*" if option == default else " "
            text = textwrap.shorten(about(group, option, file), max(30, columns - width - 6), placeholder="...")
            lines.append(f"   {mark} {option:<{width}}  {text}")
    lines += ["", "common keys (key=value):"]
    for name in _SURFACE["common_keys"]:
        key = all_keys()[name]
        lines.append(f"  {name}: {key.type_text} = {spell(key.default)}")
        lines.append(textwrap.fill(key.doc, columns, initial_indent=" " * 6, subsequent_indent=" " * 6))
    lines += ["", "all keys: embodyrl show train"]
    return "\n".join(lines)
