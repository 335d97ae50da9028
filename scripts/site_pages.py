"""MkDocs hook: the pages that are generated while the site is built: keys, commands, the Python API, shipped models."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from enum import Enum
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

from embodyrl.cli.commands import COMMANDS
from embodyrl.config import tree
from embodyrl.config.settings import Key, Settings, field_docs, spell
from embodyrl.plan.keys import all_keys


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages."""
    for page in (configuration, commands, api, zoo):
        files.append(File.generated(config, f"reference/{page.__name__}.md", content=page()))
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
        lines += [f"### {group}=", ""]
        lines += [f"`{name}`\n:   {tree.about(group, name, file)}\n" for name, file in tree.options(group).items()]
    sections: dict[str, list[Key]] = {}
    for key in all_keys().values():
        sections.setdefault(key.name.split(".")[0] if "." in key.name else "top level", []).append(key)
    for section, keys in sections.items():
        # No tables: names, types and values are long, and a page is read on a telephone too.
        lines += ["", f"## {section}", ""]
        for key in keys:
            default = "" if key.required else f", default `{spell(key.default)}`"
            lines.append(f"`{key.name}`\n:   {key.doc or 'See its section.'} *({key.type_text}{default})*\n")
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


API = {
    "embodyrl": "In your own program",
    "embodyrl.extensions.own_loop.environment": "What `make_env` returns",
    "embodyrl.types": "Records that cross seams",
    "embodyrl.envs.protocol": "What an environment is",
    "embodyrl.policies.protocol": "What a policy is",
    "embodyrl.algorithms.protocol": "What an algorithm is",
    "embodyrl.monitor.protocol": "What a logger is",
    "embodyrl.cluster.protocol": "What a launcher is",
}
"""Modules of the API reference: what is called, and what those who write a part implement."""


def api() -> str:
    """Signature and docstring of everything public."""
    lines = [
        "# Python API",
        "",
        "From the docstrings; [in your own program](../tutorials/program.md) shows how they go together.",
    ]
    for name, title in API.items():
        module = importlib.import_module(name)
        lines += ["", f"## {title}", "", f"`{name}`: {_prose(module, below=False)}"]
        for part in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, part)
            own = hasattr(module, "__all__") or getattr(value, "__module__", None) == name
            if not part.startswith("_") and own and (inspect.isclass(value) or inspect.isfunction(value)):
                lines += _entry(part, value, "###")
                members = vars(value).items() if inspect.isclass(value) else ()
                for member, inner in members:
                    if not member.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                        lines += _entry(f"{part}.{member}", inner, "####")
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any, level: str) -> list[str]:
    fields = [f"- `{field}`: {doc}" for field, doc in field_docs(value).items()] if inspect.isclass(value) else []
    return ["", f"{level} {name}", "", "```python", _signature(name, value), "```", "", _prose(value), "", *fields]


def _signature(name: str, value: Any) -> str:
    """One parameter a line where there are several."""
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, Enum | Settings)):
        return name
    signature = inspect.signature(value)
    words = [re.sub(r"<[^>]+>", "...", str(p)) for p in signature.parameters.values() if p.name != "self"]
    named = [
        i
        for i, p in enumerate(p for p in signature.parameters.values() if p.name != "self")
        if p.kind is p.KEYWORD_ONLY
    ]
    if named and not any(word.startswith("*") for word in words):
        words.insert(named[0], "*")
    inside = ", ".join(words) if len(words) < 3 else "\n    " + ",\n    ".join(words) + ",\n"
    back = signature.return_annotation
    gives = "" if inspect.isclass(value) or back is signature.empty else f" -> {back}"
    return f"{name}({inside}){gives}".replace("'", "")


def _prose(value: ModuleType | Any, *, below: bool = True) -> str:
    """A docstring as Markdown: its sections (Args, Raises) become lists."""
    text = inspect.getdoc(value) or ""
    text = text if below else text.partition("\n\n")[0]
    text = re.sub(r"^(Args|Returns|Yields|Raises):\n", r"\n**\1**\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"(\*\*(?:Returns|Yields)\*\*\n\n) +", r"\1", text)
    text = re.sub(r"^>>> .*\n(?:.+\n?)*", lambda code: indent(code[0], "    "), text, flags=re.MULTILINE)
    return re.sub(r"^    (\w[\w*, ]*): ", r"- `\1`: ", text, flags=re.MULTILINE)


def zoo() -> str:
    """The result card of every shipped checkpoint, and where the weights come from."""
    lines = [
        "# Shipped models",
        "",
        "Small starts for machines without a GPU: `model.path=assets/<name>`, or `embodyrl",
    ]
    lines += ["eval ckpt=assets/<name>`, which says whether it has been trained on what is evaluated. The others in"]
    lines += [
        "`assets/` are architectures without weights. Published checkpoints: [OpenVLA-OFT](../howto/openvla_oft.md),"
    ]
    lines += ["[pi0, pi0.5, SmolVLA](../howto/flow.md)."]
    for weights in sorted(Path(__file__).parents[1].glob("assets/*/model.safetensors")):
        card = json.loads((weights.parent / "card.json").read_text(encoding="utf-8"))
        readme = (weights.parent / "README.md").read_text(encoding="utf-8")
        about = re.sub(r"\A---.*?---\s*# \S+\s*", "", readme, flags=re.DOTALL)
        lines += ["", f"## {weights.parent.name}", "", about, "", "### Measured", "", f"    {card['command']}", ""]
        for row in card["figures"][-1]["rows"]:
            lines.append(f"- {row['name']}: {row['text']}, {row['states']} initial states")
        costs = card["costs"]
        lines += ["", f"{costs['evaluation_env_steps']:,} env steps, {costs.get('cpu_hours', 0) * 60:.0f} CPU-minutes;"]
        lines += [f"embodyrl {card['embodyrl']}, commit {card['commit'] or 'not known'}, seed {card['seeds']['run']}."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
