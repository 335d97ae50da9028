"""Commands of `embodyrl`: functions from `parts.py`, help and flags from commands.toml."""

import shutil
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl import parts
from embodyrl.registry import find_entry_points

_TEXTS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command such as `embodyrl train`, with its function, flags and help texts."""

    target: str
    """`module:function` that receives the parsed arguments and returns the exit code."""
    summary: str
    usage: str
    placeholder: str = "override"
    arguments_help: str = "group=option or key=value"
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keyword arguments of `argparse.add_argument` by flag, for example `--json`."""
    examples: tuple[str, ...] = ()
    long_help: bool = False
    """If True, the help contains config groups and common keys."""
    own_flags: bool = False
    """If True, the function of the command receives all arguments unparsed."""

    def epilog(self) -> str:
        """Return the text after the flags in `--help`."""
        text = "examples:\n" + "\n".join(f"  {example}" for example in self.examples) if self.examples else ""
        if self.long_help:
            text += "\n\n" + _format_groups_and_keys(self.usage.split()[1])
        return text


def _read_command(name: str) -> Command:
    """Return a command of `parts.py` with its texts and flags."""
    fields = dict(_TEXTS["commands"][name])
    flags = _TEXTS["flags"] | fields.pop("flag", {})
    fields["flags"] = {f"--{flag}": dict(flags[flag]) for flag in fields.get("flags", ())}
    for options in fields["flags"].values():
        if options.get("metavar") in ("DIR", "FILE", "PATH"):
            options["type"] = Path
    target = "embodyrl.cli.run:run" if fields.pop("composes", False) else parts.COMMANDS[name]
    return Command(**fields | {"target": target, "examples": tuple(fields["examples"])})


_NAMES = [*_TEXTS["first"], *sorted(parts.COMMANDS.keys() - {*_TEXTS["first"]})]
COMMANDS = {name: _read_command(name) for name in _NAMES}
"""Commands of this package by name, the most common commands first."""


def find_package_commands() -> dict[str, Command]:
    """Return the commands of other installed packages, whose functions parse their own arguments."""
    return {
        entry.name: Command(
            target=entry.value,
            summary=f"Command of the package {entry.dist.name if entry.dist else entry.module}.",
            usage=f"embodyrl {entry.name} ...",
            arguments_help="arguments of the command",
            own_flags=True,
        )
        for entry in find_entry_points(group="embodyrl.commands")
        if entry.name not in COMMANDS
    }


def overview() -> str:
    """Return the text of `embodyrl --help`."""
    commands = COMMANDS | find_package_commands()
    common_commands = {name: commands.pop(name) for name in _TEXTS["first"] if name in commands}
    width = max(map(len, [*common_commands, *commands]))
    return _TEXTS["overview"].format(first=_format_table(common_commands, width), more=_format_table(commands, width))


def _format_table(commands: Mapping[str, Command], width: int) -> str:
    columns = _get_help_width()
    return "\n".join(
        textwrap.fill(f"  {name:<{width}}  {command.summary}", columns, subsequent_indent=" " * (width + 4))
        for name, command in commands.items()
    )


def _get_help_width() -> int:
    """Return the width of help texts in characters: argparse's width, with an upper limit for readability."""
    return min(120, shutil.get_terminal_size().columns - 2)


def _format_groups_and_keys(command: str) -> str:
    """Return the sections "groups" and "common keys" of the help of commands such as `train`."""
    from embodyrl.cli.output import group_variants
    from embodyrl.config import compose
    from embodyrl.config.settings import format_value
    from embodyrl.plan.schema import choose_classes

    columns = min(100, _get_help_width())
    lines = ["groups (group=option; * = default; `embodyrl list envs` describes options):"]
    for group, default in compose.default_options(command).items():
        families = group_variants(group, compose.options(group))
        names = [f"{'*' * (name == default)}{name}" for name in families]
        lines.append(_wrap(f"  {group:<10}  {', '.join(names)}", columns, 14))
    problems: list[str] = []
    values = {setting.key: setting.value for setting in compose.compose(command, [], [], problems)[2]}
    keys = choose_classes(command, values, problems)[0].keys
    if not keys.keys() >= {*_TEXTS["common_keys"]}:  # the help of other commands also shows keys of `train`
        from embodyrl.plan.keys import all_keys

        keys = all_keys()
    lines += ["", f"common keys (key=value, with the values of `embodyrl {command}` without arguments):"]
    for name in _TEXTS["common_keys"]:
        value = format_value(values.get(name, keys[name].default))
        lines.append(_wrap(f"  {name}={value}  {keys[name].doc}", columns, 6))
    return "\n".join([*lines, "", f"all keys: embodyrl show {command}"])


def _wrap(text: str, columns: int, indent: int) -> str:
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
