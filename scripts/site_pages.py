"""MkDocs hook: the pages that are generated from the code while the site is built (keys, commands, choices)."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from embodyrl.cli.commands import COMMANDS
from embodyrl.config import tree
from embodyrl.config.settings import Key, spell
from embodyrl.plan.keys import all_keys


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages."""
    for name, text in (("configuration.md", configuration()), ("commands.md", commands())):
        files.append(File.generated(config, name, content=text))
    return files


def configuration() -> str:
    """Every group with its options, every key with type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Type `group=option` to choose, `key=value` to change; `embodyrl show env=libero_10`",
    ]
    lines += ["prints the keys that one choice of parts reads, with their values; it refuses the others where they are"]
    lines += ["typed. This page has those of all parts that come with the package.", "", "## Options", ""]
    for group in tree.default_options("train"):
        lines += [f"### {group}=", "", "| option | |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(tree.one_line(file))} |" for name, file in tree.options(group).items()] + [""]
    sections: dict[str, list[Key]] = {}
    for key in all_keys().values():
        sections.setdefault(key.name.split(".")[0] if "." in key.name else "top level", []).append(key)
    for section, keys in sections.items():
        lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            default = "" if key.required else f"`{spell(key.default)}`"
            cells = (f"`{key.name}`", f"`{key.type_text}`", default, key.doc)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command with usage, flags and examples."""
    lines = ["# Commands", "", "`embodyrl COMMAND --help` prints the same."]
    for name, command in COMMANDS.items():
        lines += ["", f"## {name}", "", command.summary, "", f"    {command.usage}", ""]
        flags = [f"| `{flag}` | {_cell(options['help'])} |" for flag, options in command.flags.items()]
        lines += ["| flag | |", "|---|---|", *flags, ""] if flags else []
        lines += ["Examples:", "", *(f"    {example}" for example in command.examples)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
