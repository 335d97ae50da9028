"""The core works without any extension and without each single extension."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import TESTS

from embodyrl.manifests import FOLDERS, extensions

ROOT = Path(__file__).parents[2]
ALL = "all extensions"
REMOVED = (*sorted(extensions()), ALL)


def dependents(name: str) -> set[str]:
    """Return an extension and those that import it, directly or not."""
    if name == ALL:
        return {*extensions()}
    found, added = {name}, True
    while added:
        added = {other for other, extension in extensions().items() if found & {*extension.imports}} - found
        found |= added
    return found


def link(source: str, target: str) -> None:
    """Create a hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_without(name: str, tree: Path, *folders: str, copy: Callable[[str, str], object] = shutil.copy2) -> Path:
    """Copy the package and its configs, and further folders of the repository, without the code of an extension."""
    removed = {ROOT / "embodyrl" / path for other in dependents(name) for path in extensions()[other].paths}

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {entry for entry in names if Path(folder, entry) in removed}

    for part in ("embodyrl", *folders):
        shutil.copytree(ROOT / part, tree / part, ignore=left_out, copy_function=copy)
    for part in ("conf", "assets", "pyproject.toml"):
        (tree / part).symlink_to(ROOT / part)
    return tree


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("trees")
    trees = [copy_without(name, folder / name, copy=link) for name in REMOVED]
    command = [sys.executable, str(Path(__file__).with_name("removal.py")), *map(str, trees)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry["tree"]: entry["error"] for entry in found}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REMOVED)
def test_core_trains_a_step_without_extension(errors, name):
    assert errors[name] == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_core_suite_passes_without_extensions(tmp_path):
    """One run without all extensions; the test above covers each single extension."""
    tree = copy_without(ALL, tmp_path / "tree", "tests", "docs", "scripts")
    for entry in ROOT.glob("[!.]*"):
        target, is_file = tree / entry.name, entry.is_file()
        if is_file or entry.name in ("conf", "assets"):  # a source distribution contains no links
            target.unlink(missing_ok=True)
            (shutil.copy2 if is_file else shutil.copytree)(entry, target)
        elif not target.exists():
            target.symlink_to(entry)
    command = [sys.executable, "-m", "pytest", "-q", "--core", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, timeout=3500)
    assert done.returncode == 0


def test_needs_markers_name_existing_extensions():
    """A misspelt name would skip the test in every tree."""
    if not extensions():
        pytest.skip("this tree has no extensions")
    known = {*extensions(), *(path.name for folder in FOLDERS for path in (TESTS / folder).glob("*/"))}
    for file in TESTS.rglob("test_*.py"):
        for marked in re.findall(r"mark\.needs\(([^)]*)\)", file.read_text(encoding="utf-8")):
            assert {*re.findall(r"\w+", marked)} <= known, file
