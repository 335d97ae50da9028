"""Project rules that can be checked on the source files."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "embodyrl"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in FILES]


def test_no_class_is_called_manager_helper_or_utils():
    vague = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.search(r"Manager|Helper|Utils?$", node.name)
    ]
    assert vague == []


COPIES = ("embodyrl/config/settings.py", "embodyrl/plan/config.py", "embodyrl/plan/schema.py")
"""Functions that compose a config; settings classes may return a variant of themselves."""


def test_a_config_is_final_after_loading():
    changed = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "updated" or (node.func.attr == "model_copy" and "cfg" in ast.unparse(node.func)))
        and path.name != "settings.py"
        and str(path) not in COPIES
    ]
    assert changed == [], "derive the value while the config is loaded, or make it a field of the run plan"


def component_names() -> set[str]:
    """Short names of environments, models, estimators and losses, and of the option files that select them."""
    from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
    from embodyrl.config import compose
    from embodyrl.envs import ENVS
    from embodyrl.policies import POLICIES

    names = {name for registry in (ENVS, POLICIES, ADVANTAGES, LOSSES) for name in registry.names()}
    options = {name.rpartition("/")[2] for group in ("env", "model", "algorithm") for name in compose.options(group)}
    return names | options


def _compared(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        yield node.left
        for side in node.comparators:
            yield from side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
    elif isinstance(node, ast.MatchValue):
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
        yield from node.args


def test_code_outside_a_component_does_not_branch_on_its_name():
    """Comparisons with the name of an environment, a model or an algorithm outside of its folder."""
    names = component_names()
    assert {"libero", "openvla_oft", "grpo", "gae", "ppo_clip", "libero_10"} <= names
    own = [Path("embodyrl/envs"), Path("embodyrl/policies"), Path("embodyrl/algorithms")]
    branches = [
        f"{path}:{node.lineno} '{side.value}'"
        for path, tree in trees()
        if not any(path.is_relative_to(folder) for folder in own)
        for node in ast.walk(tree)
        for side in _compared(node)
        if isinstance(side, ast.Constant) and side.value in names
    ]
    assert branches == []


def test_components_do_not_branch_on_names_of_other_components():
    """Inside envs/, policies/ and algorithms/: no name of the other two kinds, and no sibling's folder name."""
    folders = {kind: {p.name for p in (PACKAGE / kind).iterdir() if p.is_dir()} for kind in ("envs", "policies")}
    wrong = []
    for path, tree in trees():
        kind, owner = path.parts[1], path.parts[2] if len(path.parts) > 3 else None
        foreign = {name for names in folders.values() for name in names} - {owner, "__pycache__"}
        if kind not in ("envs", "policies", "algorithms"):
            continue
        wrong += [
            f"{path}:{node.lineno} '{side.value}'"
            for node in ast.walk(tree)
            for side in _compared(node)
            if isinstance(side, ast.Constant) and side.value in foreign
        ]
    assert wrong == []


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def test_no_tracked_file_mentions_a_developer_machine():
    home = re.compile(rb"/(?:home|Users)/\w+/|/work" rb"/(?:main|shared|venv|\.)|/roo" rb"t/|[Cc]:\\\\Users")
    found = [
        f"{path.relative_to(ROOT)}: {match[0].decode()}"
        for path in tracked_files()
        if path.suffix not in (".safetensors", ".npz", ".png", ".mp4") and path.is_file()
        for match in home.finditer(path.read_bytes())
    ]
    assert found == []


def test_no_tracked_file_is_generated_or_huge():
    files = [path for path in tracked_files() if path.is_file()]
    generated = [p for p in files if p.suffix in (".pyc", ".pkl", ".log") or "__pycache__" in p.parts]
    assert generated == []
    assert [str(p.relative_to(ROOT)) for p in files if p.stat().st_size > 20 * 2**20] == []


def test_loading_cannot_run_code():
    """No pickle, no YAML objects, no eval of text; `torch.load` only with `weights_only=True`.

    `sandboxed.py`, `sandboxed_calls.py` and `sandboxed_tests.py` run a language model's programs with limits, and load
    nothing;
    `channel.py` reads messages of the run's own processes, as `multiprocessing` does, and
    `isolation` those of its parent process.
    """
    dangerous = {"pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            boxed = (str(path), name) in (
                ("embodyrl/text/sandboxed.py", "exec"),
                ("embodyrl/text/sandboxed_calls.py", "exec"),
                ("embodyrl/text/sandboxed_tests.py", "exec"),
                ("embodyrl/channels/channel.py", "pickle.loads"),
                ("embodyrl/isolation.py", "pickle.load"),
            )
            if (name in dangerous and not boxed) or (name == "torch.load" and not safe):
                found.append(f"{path}:{node.lineno} {name}")
    assert found == []


def test_source_contains_no_unfinished_code():
    marks = re.compile(r"NotImplementedError|\b(?:TODO|FIXME|XXX)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_test_modules_have_distinct_names():
    """Two test files with one name cannot be collected together, because tests/ has no packages."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
