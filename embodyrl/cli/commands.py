"""The commands of the program, read from commands.toml. Light: it is imported for every call."""

import shutil
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SURFACE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the program."""

    summary: str
    target: str
    """`module:function`; called with the parsed arguments, returns the exit code."""
    usage: str
    words: str = "override"
    words_help: str = "group=option or key=value"
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`--flag` with its argparse options."""
    examples: tuple[str, ...] = ()
    long_help: bool = False
    """Add groups and the commonest keys to the help."""
    own_flags: bool = False
    """Flags behind the first word belong to what the command starts."""

    def epilog(self) -> str:
        """Text below the flags in `--help`."""
        text = "examples:\n" + "\n".join(f"  {e}" for e in self.examples)
        if self.long_help:
            text += "\n\n" + _groups_and_keys()
        return text


def _read(raw: dict[str, Any]) -> Command:
    flags = {f"--{name}": dict(_SURFACE["flags"][name]) for name in raw.get("flags", ())}
    for options in flags.values():
        if options.get("metavar") in ("DIR", "FILE", "PATH"):
            options["type"] = Path
    return Command(**raw | {"flags": flags, "examples": tuple(raw["examples"])})


COMMANDS: dict[str, Command] = {name: _read(raw) for name, raw in _SURFACE["commands"].items()}


def overview() -> str:
    """Text of `embodyrl --help`."""
    width, columns = max(map(len, COMMANDS)), _columns()
    lines = [
        textwrap.fill(f"  {name:<{width}}  {command.summary}", columns, subsequent_indent=" " * (width + 4))
        for name, command in COMMANDS.items()
    ]
    return _SURFACE["overview"].format(commands="\n".join(lines))


def _columns() -> int:
    """Width of text for this terminal, as argparse chooses it, and never too wide to read."""
    return min(120, shutil.get_terminal_size().columns - 2)


def _groups_and_keys() -> str:
    """Return the sections "groups" and "common keys" of the help of a run command."""
    from embodyrl.config import tree
    from embodyrl.config.settings import spell
    from embodyrl.plan.keys import all_keys

    lines, columns = ["groups (group=option; * = default):"], _columns()
    for group, default in tree.default_options("train").items():
        lines.append(f"  {group}")
        found = tree.options(group)
        width = max(map(len, found))
        for option, file in found.items():
            mark = "*" if option == default else " "
            text = textwrap.shorten(tree.about(group, option, file), max(30, columns - width - 6), placeholder="...")
            lines.append(f"   {mark} {option:<{width}}  {text}")
    lines += ["", "common keys (key=value):"]
    for name in _SURFACE["common_keys"]:
        key = all_keys()[name]
        lines.append(f"  {name}: {key.type_text} = {spell(key.default)}")
        lines.append(textwrap.fill(key.doc, columns, initial_indent=" " * 6, subsequent_indent=" " * 6))
    lines += ["", "all keys: embodyrl show train"]
    return "\n".join(lines)
