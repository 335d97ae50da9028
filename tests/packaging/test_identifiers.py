"""Plain words in the identifiers and module names of the package (`banned_in_names` of words.toml)."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
BANNED, ALLOWED = {*WORDS["banned_in_names"].split()}, {*WORDS["allowed_names"].split()}
MAX_ALLOWED = 30


def parts_of(name: str) -> set[str]:
    """Return the words of a name in snake_case or CamelCase, in lower case."""
    return {*re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")}


def defined_names(source: str) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def package_names() -> dict[str, str]:
    """Return the names of the package and of its modules, each with one file that defines it."""
    names: dict[str, str] = {}
    for path in sorted((ROOT / "embodyrl").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        module = path.parent.name if path.name == "__init__.py" else path.stem
        names |= dict.fromkeys([module, *defined_names(path.read_text(encoding="utf-8"))], file)
    return names


def test_names_contain_no_banned_words():
    banned = {name: file for name, file in package_names().items() if parts_of(name) & BANNED}
    assert [f"{file}: {name}" for name, file in banned.items() if name not in ALLOWED] == [], "choose plain names"


def test_list_of_allowed_names_only_shrinks():
    names = package_names()
    assert len(ALLOWED) <= MAX_ALLOWED
    assert [name for name in ALLOWED if name not in names or not parts_of(name) & BANNED] == [], "remove these"


@pytest.mark.parametrize(
    "source", ["found = 1", "def f(slot): ...", "class Seen: ...", "self.kept_rows = 1", "def refuseAll(): ..."]
)
def test_banned_words_in_names_are_detected(source: str):
    assert any(parts_of(name) & BANNED for name in defined_names(source))


def test_plain_names_are_accepted():
    assert not any(
        parts_of(name) & BANNED for name in defined_names("class FoundationEnv:\n    def take_slotted(self): ...")
    )
