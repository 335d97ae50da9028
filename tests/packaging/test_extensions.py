"""The core imports no extension, and extensions import only declared extensions (extension.toml)."""

from __future__ import annotations

import ast
from pkgutil import resolve_name

import pytest
from test_imports import ROOT, cycle, imports, owner

from embodyrl.manifests import declared, extensions


def crossing() -> list[tuple[str, str]]:
    """Return imports between different owners whose target is an extension."""
    return [
        (module, target)
        for module, targets in imports().items()
        for target in targets
        if owner(target) not in (None, owner(module))
    ]


def test_every_listed_path_exists():
    for name, extension in extensions().items():
        for path in extension.paths:
            assert (ROOT / "embodyrl" / path).exists(), (name, path)
        assert {*extension.imports} <= {*extensions()}, name


def test_every_extension_folder_has_a_manifest():
    folders = {path.name for path in (ROOT / "embodyrl" / "extensions").iterdir() if any(path.glob("*.py"))}
    assert folders <= {*extensions()}


def test_entry_points_reference_modules_of_their_extension():
    for name, extension in extensions().items():
        for targets in extension.entry_points.values():
            assert {owner(target.partition(":")[0]) for target in targets.values()} <= {name}


def test_names_of_extensions_are_registered():
    from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
    from embodyrl.cluster import LAUNCHERS
    from embodyrl.config.sections import SECTIONS
    from embodyrl.envs import ENVS
    from embodyrl.monitor import MONITORS
    from embodyrl.policies import POLICIES

    for registry in (ADVANTAGES, ENVS, LAUNCHERS, LOSSES, MONITORS, POLICIES, SECTIONS):
        for name, target in declared(registry.group).items():
            assert name in registry.names()
            assert registry.problems([name], "key") == []
            missing = extensions()[owner(target.partition(":")[0]) or ""].install_line()
            assert missing or registry.get(name)


@pytest.mark.parametrize("group", ["embodyrl.program_keys", "embodyrl.plain_keys"])
def test_keys_with_a_trust_rule_exist(group):
    """A renamed key would lose its rule silently."""
    for name, target in declared(group).items():
        assert name.partition(".")[2] in resolve_name(target).model_fields, name


def test_every_key_that_names_an_interpreter_requires_trust():
    from embodyrl.config.trust import STARTED
    from embodyrl.plan.keys import all_keys

    assert [name for name in all_keys() if name.endswith(".python") and name not in STARTED.names()] == []


def test_core_imports_no_extension():
    found = {f"{module} -> {target}" for module, target in crossing() if owner(module) is None}
    assert found == set(), "the core must not import extensions: register an entry point instead"


def test_extensions_import_only_declared_extensions():
    undeclared = [
        f"{module} ({mine}) -> {target} ({theirs})"
        for module, target in crossing()
        if (mine := owner(module)) and (theirs := owner(target)) not in extensions()[mine].imports
    ]
    assert undeclared == []


def test_declared_extension_imports_are_used_and_acyclic():
    used = {(owner(module), owner(target)) for module, target in crossing()}
    listed = {(name, other) for name, extension in extensions().items() for other in extension.imports}
    assert listed - used == set()
    assert cycle({name: frozenset(extension.imports) for name, extension in extensions().items()}) == []


@pytest.mark.needs("checkpoints", "doctor", "text")
def test_entry_point_groups_have_public_names():
    """Installed packages register by these names, which do not follow the folders of the code."""
    found = {
        node.value.value
        for file in (ROOT / "embodyrl").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "group" and isinstance(node.value, ast.Constant)
    }
    groups = {name for name in found if name.startswith("embodyrl")}
    assert {"embodyrl.envs", "embodyrl.policies", "embodyrl.rewards", "embodyrl.tools", "embodyrl.monitors"} <= groups
    assert [name for name in groups if name.count(".") != 1] == []
