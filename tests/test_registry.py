"""Parts are selected by name, entry point or import path; broken plug-ins are reported and do not affect others."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl import parts
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.cli.commands import find_package_commands
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.inline import InlineLauncher
from embodyrl.commands import COMMANDS
from embodyrl.envs import ENVS
from embodyrl.errors import UnknownNameError
from embodyrl.monitor import MONITORS
from embodyrl.policies import POLICIES
from embodyrl.registry import REWARDS, Registry, has, load

NUMBERS = {"tau": "math:tau"}
REGISTRIES: dict[str, tuple[Registry, str]] = {
    "envs": (ENVS, "gym"),
    "policies": (POLICIES, "mlp"),
    "advantages": (ADVANTAGES, "grpo"),
    "losses": (LOSSES, "ppo_clip"),
    "rewards": (REWARDS, "exact"),
    "monitors": (MONITORS, "jsonl"),
    "launchers": (LAUNCHERS, "inline"),
    "commands": (COMMANDS, "train"),
}
"""The registry of each entry-point group, and a built-in name."""


def numbers() -> Registry[float]:
    return Registry("number", group="my.numbers", parts=NUMBERS, wants="a tau", fits=has("hex"))


def install(folder: Path, package: str, points: str) -> None:
    """Write the metadata of an installed package with entry points."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(points)


@pytest.mark.parametrize("body", ["import sys\nsys.exit(9)\n", "1 / 0\n", "def broken(:\n", "raise RecursionError\n"])
def test_failing_plugin_import_is_reported(tmp_path, monkeypatch, body: str) -> None:
    (tmp_path / "plugin_that_fails.py").write_text(body)
    install(tmp_path, "failing", "[my.numbers]\nbroken = plugin_that_fails:X\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert numbers().names() == ["broken", "tau"]
    with pytest.raises(UnknownNameError, match=r"Cannot import 'plugin_that_fails' for number .*Repair or remove"):
        numbers().get("broken")
    assert numbers().get("tau") > 6


def test_unknown_name_error_suggests_a_part_of_the_same_module() -> None:
    with pytest.raises(UnknownNameError, match=r"not a tau\. Did you mean math:pi or math:e or math:tau\?$"):
        numbers().get("math:cos")
    with pytest.raises(UnknownNameError, match="not a tau"):
        load("embodyrl.datasets.tasks:__name__", "number", wants="a tau", fits=has("hex"))
    with pytest.raises(UnknownNameError, match=r"Unknown tool 'tua'\. Did you mean 'tau'\?"):
        load("tua", "tool", wants="a tau", fits=has("hex"), names=NUMBERS)


@pytest.mark.parametrize("group", REGISTRIES)
def test_package_adds_a_second_component_to_each_group(tmp_path, monkeypatch, group: str) -> None:
    registry, name = REGISTRIES[group]
    target = getattr(parts, {"envs": "ENVIRONMENTS"}.get(group, group.upper()))[name]
    install(tmp_path, "outside", f"[embodyrl.{group}]\nsecond = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.group == f"embodyrl.{group}"
    assert "second" in registry.names()
    assert registry.get("second") is registry.get(name) is registry.get(target)
    assert group != "commands" or find_package_commands()["second"].target == target


@pytest.mark.parametrize("group", REGISTRIES)
def test_duplicate_component_name_error_names_both_packages(tmp_path, monkeypatch, group: str) -> None:
    registry, name = REGISTRIES[group]
    install(tmp_path, "outside", f"[embodyrl.{group}]\n{name} = math:tau\nnew = math:tau\n")
    install(tmp_path, "another", f"[embodyrl.{group}]\nnew = math:pi\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownNameError, match=rf"'{name}' is defined by embodyrl .* and by outside \(math:tau\)\."):
        registry.get(name)
    with pytest.raises(UnknownNameError, match=r"outside \(math:tau\)") as error:
        registry.get("new")
    assert "another (math:pi)" in str(error.value)


def test_launcher_without_the_base_class_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LAUNCHERS.get("embodyrl.cluster.inline:InlineLauncher") is InlineLauncher
    names = ("settings", "spans_hosts", "in_process", "where", "lost", "describe_hosts", "nodes", "start", "send")
    own = {name: getattr(InlineLauncher, name) for name in (*names, "wait", "stop")}  # but neither host nor interrupt
    monkeypatch.setattr("embodyrl.cluster.inline.OwnLauncher", type("OwnLauncher", (), own), raising=False)
    with pytest.raises(UnknownNameError, match=r"not a subclass of embodyrl.cluster.protocol.Launcher"):
        LAUNCHERS.get("embodyrl.cluster.inline:OwnLauncher")
