"""The commands of the program, read from commands.toml. Light: it is imported for every call."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

_SURFACE: dict[str, Any] = tomllib.loads(files("embodyrl.cli").joinpath("commands.toml").read_text(encoding="utf-8"))


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
            from embodyrl.cli.help import groups_and_keys

            text += "\n\n" + groups_and_keys()
        return text


def _read(raw: dict[str, Any]) -> Command:
    flags = {f"--{name}": _SURFACE["flags"][name] for name in raw.get("flags", ())}
    return Command(**raw | {"flags": flags, "examples": tuple(raw["examples"])})


COMMANDS: dict[str, Command] = {name: _read(raw) for name, raw in _SURFACE["commands"].items()}


def overview() -> str:
    """Text of `embodyrl --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    examples = [f"  {COMMANDS[name].examples[0]}" for name in ("train", "eval", "list", "doctor")]
    examples.insert(1, f"  {COMMANDS['train'].examples[1]}")
    return "\n".join(
        (
            "usage: embodyrl <command> [group=option ...] [key=value ...] [flags]",
            "",
            "Reinforcement learning for vision-language-action policies inside simulators.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            *examples,
            "",
            "`embodyrl <command> --help` shows the flags and settings of a command.",
            "Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 a check failed, 4 workers beyond their restart",
            "budget, 5 non-finite numbers, 6 unusable checkpoint, 130 Ctrl-C.",
        )
    )
