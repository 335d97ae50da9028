"""The command `new`: a small working package, or an experiment file, to start from."""

import argparse
import importlib.util
import keyword
import re
from pathlib import Path

from embodyrl.config import tree
from embodyrl.errors import ConfigError
from embodyrl.registry import closest

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"

GROUPS = {"env": "env", "policy": "model", "algorithm": "algorithm", "experiment": "experiment"}
"""Kind -> the group of conf/ in which the new option will appear."""
LOOSE = ("experiment",)
"""Kinds that are files in ./conf, not packages of their own."""

_PACKAGE = "pip install -e {name}    (or: export PYTHONPATH={name})"
_TRY = "embodyrl train env=tabletop {group}={name} --config-dir {name}/conf"
NEXT = {
    "env": (
        _PACKAGE,
        "embodyrl check-env env={name} --config-dir {name}/conf",
        "embodyrl train experiment={name} --config-dir {name}/conf",
    ),
    "policy": (_PACKAGE, _TRY),
    "algorithm": (_PACKAGE, _TRY),
    "experiment": ("embodyrl train experiment={name} --config-dir conf",),
}


def new(args: argparse.Namespace) -> int:
    """Run `embodyrl new KIND NAME`."""
    if len(args.words) != 2:
        raise ConfigError(f"embodyrl new takes a kind ({', '.join(GROUPS)}) and a name, for example: new env my_env.")
    kind, name = args.words
    if kind not in GROUPS:
        raise ConfigError(f"cannot make a new '{kind}'.{closest(kind, GROUPS)} One of: {', '.join(GROUPS)}.")
    files = render(kind, name)
    taken = [str(path) for path in (files if kind in LOOSE else [Path(name)]) if path.exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)} exists already and is left as it is; choose another name or remove it.")
    if name in tree.options(GROUPS[kind]):
        raise ConfigError(f"{GROUPS[kind]}={name} ships with embodyrl already; choose another name.")
    if kind not in LOOSE and importlib.util.find_spec(name) is not None:
        raise ConfigError(f"a Python module '{name}' is installed already and would be hidden; choose another name.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"  {path}")
    print("next:")
    for line in NEXT[kind]:
        print(f"  {line.format(name=name, group=GROUPS[kind])}")
    return 0


def render(kind: str, name: str) -> dict[Path, str]:
    """Return the files of a template, relative to the working directory, with the name filled in.

    Raises:
        ConfigError: the name is no lower-case Python name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"'{name}' cannot be the name: use lower-case letters, digits and _, for example my_{kind}.")
    root = Path() if kind in LOOSE else Path(name)
    words = {"@name@": name, "@Class@": name.title().replace("_", "")}
    files: dict[Path, str] = {}
    for template in sorted((TEMPLATES / kind).rglob(f"*{SUFFIX}")):
        relative = template.relative_to(TEMPLATES / kind).as_posix().removesuffix(SUFFIX).replace("NAME", name)
        text = template.read_text(encoding="utf-8")
        for mark, word in words.items():
            text = text.replace(mark, word)
        files[root / relative] = text
    assert files, kind
    return files
