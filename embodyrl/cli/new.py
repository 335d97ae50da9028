"""The command `new`, which generates a small working package or an experiment file from a template."""

import argparse
import importlib.util
import keyword
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embodyrl.cli.arguments import choose_name
from embodyrl.config import compose
from embodyrl.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"

_TRAIN_COMMAND = "embodyrl train env=tabletop {group}={name} --config-dir {name}/conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of template, such as `env` or `policy`."""

    group: str = ""
    """Config group of the new option; empty: the option is selected by its path."""
    entries: str = ""
    """Entry-point group of the package; empty: the template is a file in ./conf, not a package."""
    target: str = ""
    """Attribute of the package to which the entry point refers."""
    next_commands: Sequence[str] = (_TRAIN_COMMAND,)
    """Commands that are suggested to the user after the generation."""


_KIND_TABLE = tomllib.loads((TEMPLATES / "kinds.toml").read_text(encoding="utf-8"))
KINDS = {name: Kind(**raw) for name, raw in _KIND_TABLE.items()}


def new(args: argparse.Namespace) -> int:
    """Run `embodyrl new KIND NAME`."""
    kind = choose_name(args.arguments, KINDS, "embodyrl new needs a kind and a name, for example: new env my_env")
    if len(args.arguments) != 2:
        raise ConfigError(f"embodyrl new {kind} takes one name, for example: embodyrl new {kind} my_package.")
    name = args.arguments[1]
    template_kind, files = KINDS[kind], render(kind, name)
    existing = [str(path) for path in ([Path(name)] if template_kind.entries else files) if path.exists()]
    if existing:
        raise ConfigError(
            f"These paths already exist: {', '.join(existing)}. Choose another name, or remove the paths."
        )
    if template_kind.group and name in compose.options(template_kind.group):
        raise ConfigError(f"{template_kind.group}={name} is already an option of embodyrl. Choose another name.")
    if template_kind.entries and importlib.util.find_spec(name) is not None:
        raise ConfigError(f"The installed Python module '{name}' would be shadowed. Choose another name.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"  {path}")
    install = ["pip install -e {name}    (or: export PYTHONPATH={name})"] if template_kind.entries else []
    print("next:")
    for line in (*install, *template_kind.next_commands):
        print(f"  {line.format(group=template_kind.group, **_placeholder_values(kind, name))}")
    return 0


def _placeholder_values(kind: str, name: str) -> dict[str, str]:
    values = {"name": name, "Class": name.title().replace("_", "")}
    return {**values, "entries": KINDS[kind].entries, "target": KINDS[kind].target.format(**values)}


def render(kind: str, name: str) -> dict[Path, str]:
    """Return the files of a template, relative to the working directory, with the name filled in.

    Raises:
        ConfigError: the name is not a lower-case Python name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"'{name}' is not a valid name: use lower-case letters, digits and _, for example my_{kind}.")
    package = bool(KINDS[kind].entries)
    files: dict[Path, str] = {}
    for folder in (*([TEMPLATES / "package"] if package else []), TEMPLATES / kind):
        for template in sorted(folder.rglob(f"*{SUFFIX}")):
            relative = template.relative_to(folder).as_posix().removesuffix(SUFFIX).replace("NAME", name)
            text = template.read_text(encoding="utf-8")
            for placeholder, value in _placeholder_values(kind, name).items():
                text = text.replace(f"@{placeholder}@", value)
            files[(Path(name) if package else Path()) / relative] = text
    assert files, kind
    return files
