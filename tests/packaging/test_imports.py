"""The import graph of the package, with function-level and type-only imports."""

import ast
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from embodyrl import parts

ROOT = Path(__file__).parents[2]


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the modules of the package with the modules of the package that they import anywhere."""
    files = {}
    for file in sorted((ROOT / "embodyrl").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found = {}
    for module, file in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in files else node.module for name in whole}
        found[module] = frozenset(names & set(files) - {module})
    return found


def folder(module: str) -> str:
    """Return the layer of a module: its folder below the package."""
    return ".".join(module.split(".")[:2])


def cycle(graph: Mapping[str, frozenset[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_import_cycle_is_detected():
    assert cycle({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a")})
    assert not cycle({"a": frozenset("bc"), "b": frozenset("c")})


@pytest.mark.parametrize("unit", ["modules", "folders"])
def test_imports_have_no_cycles(unit):
    graph = imports()
    if unit == "folders":
        names = {folder(module) for module in graph}
        graph = {
            name: frozenset(folder(t) for m in graph if folder(m) == name for t in graph[m]) - {name} for name in names
        }
    assert len(graph) > 20 - 5 * (unit == "folders")
    assert cycle(graph) == []


def layers() -> Mapping[str, int]:
    """Return the number of the layer of each folder in the import contract; 0 is the top."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert "ignore_imports" not in contract
    return {name.strip(): i for i, row in enumerate(contract["layers"]) for name in row.split("|")}


def test_imports_follow_the_layer_order():
    """The layers of the import contract, also for function-level and type-only imports."""
    level = layers()
    upwards = [
        f"{module} -> {target}"
        for module, targets in imports().items()
        for target in targets
        if folder(target) != "embodyrl"
        and folder(module) not in ("embodyrl", folder(target))
        and level[folder(target)] <= level[folder(module)]
        and level[folder(module)] < max(level.values())
    ]
    assert upwards == []
    assert {folder(module) for module in imports()} - set(level) == {"embodyrl"}


def test_components_are_in_the_folder_of_their_group():
    """Strings of `parts.py` name modules that exist, in the folders that an import of them would allow."""
    folders = {
        "ENVIRONMENTS": "envs",
        "POLICIES": "policies",
        "ADVANTAGES": "algorithms",
        "LOSSES": "algorithms",
        "REWARDS": "text",
        "MONITORS": "monitor",
        "LAUNCHERS": "cluster",
    }
    tables = {name: table for name, table in vars(parts).items() if name.isupper() and name != "EXTRAS"}
    assert set(tables) == {*folders, "COMMANDS"}
    modules = {name: {target.partition(":")[0] for target in table.values()} for name, table in tables.items()}
    assert [m for found in modules.values() for m in found if m not in imports()] == []
    homes = {name: {folder(m) for m in found} for name, found in modules.items()}
    assert homes.pop("COMMANDS") <= {"embodyrl.cli", "embodyrl.commands"}
    assert homes == {name: {f"embodyrl.{home}"} for name, home in folders.items()}


def test_documented_files_exist():
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|yaml))`", text))
    assert len(named) > 30
    assert [
        name for name in sorted(named) if not any((base / name).exists() for base in (ROOT / "embodyrl", ROOT))
    ] == []
    for room in re.findall(r"^    (?:\w+/  )*(\w+)/ ", text, flags=re.MULTILINE):
        assert (ROOT / "embodyrl" / room).is_dir(), room


def test_no_private_module_of_a_dependency_is_imported():
    """Neither imports nor attributes: `torch._utils`, `torch.ops.mkldnn`."""
    private = set()
    for file in (ROOT / "embodyrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", dotted := ast.unparse(node)):
                names = [dotted.replace("torch.ops.", "torch._ops.").replace("torch.__version__", "torch")]
            outside = (name.split(".") for name in names if name.partition(".")[0] not in ("embodyrl", "__future__"))
            private |= {(file.name, ".".join(parts)) for parts in outside if any(p.startswith("_") for p in parts)}
    assert private == set()


PRIVATE_OF_SIMULATORS = {
    "libero": "_address _check_success _data _eval_predicate _initialize_sim _model _observables _post_action "
    "_post_process _pre_action _render_context_offscreen _update_observables",
    "maniskill": "_batched_episode_rng _episode_rng _get_obs_sensor_data _get_obs_state_dict _initialize_episode "
    "_obs_mode _reconfigure _reset_mask _sensor_configs",
    "metaworld": "_freeze_rand_vec _get_obs _partially_observable _set_task_called",
    "robots": "_check_success",
}
"""Attributes without a public equivalent: resets of single rows, raw MuJoCo models, steps without rendering."""


def private_attributes(file: Path) -> set[str]:
    """Return private attributes that a file reads from other objects and that none of its own classes defines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    fields = [item for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body]
    own = {item.name for item in fields if isinstance(item, ast.FunctionDef)}
    own |= {i.target.id for i in fields if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name)}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    mine = [node for node in attributes if ast.unparse(node.value) in ("self", "cls", "super()")]
    if file.parent.name not in PRIVATE_OF_SIMULATORS:
        own |= {node.attr for node in mine}
    return {
        node.attr
        for node in attributes
        if node not in mine and re.fullmatch("_[a-z]\\w*", node.attr) and node.attr not in own | {"_exit", "_replace"}
    }


def test_no_private_attribute_of_a_dependency_is_used():
    """Private attributes of our own classes are not used in other files."""
    found = {(file, name) for file in (ROOT / "embodyrl").rglob("*.py") for name in private_attributes(file)}
    simulators = {name: set[str]() for name in PRIVATE_OF_SIMULATORS}
    others = set()
    for file, name in found:
        if (home := file.parent.name) in simulators:
            simulators[home].add(name)
        else:
            others.add((file.name, name))
    assert others == {("profiling.py", "_current_frames")}, "a documented function of sys"
    assert simulators == {name: set(names.split()) for name, names in PRIVATE_OF_SIMULATORS.items()}
