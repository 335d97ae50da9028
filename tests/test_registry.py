"""Broken plug-ins are reported and do not affect others."""

from __future__ import annotations

import pytest

from embodyrl.errors import UnknownNameError
from embodyrl.registry import Registry, has


@pytest.mark.parametrize("body", ["import sys\nsys.exit(9)\n", "1 / 0\n", "def broken(:\n", "raise RecursionError\n"])
def test_failing_plugin_import_is_reported(tmp_path, monkeypatch, body: str) -> None:
    (tmp_path / "plugin_that_fails.py").write_text(body)
    entry = tmp_path / "failing-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1\n")
    (entry / "entry_points.txt").write_text("[my.numbers]\nbroken = plugin_that_fails:X\n")
    monkeypatch.syspath_prepend(tmp_path)
    numbers: Registry[float] = Registry("number", group="my.numbers", wants="a tau", fits=has("hex"))
    numbers.add("tau", "math:tau")
    assert numbers.names() == ["broken", "tau"]
    with pytest.raises(UnknownNameError, match=r"Cannot import 'plugin_that_fails' for number .*Repair or remove"):
        numbers.get("broken")
    assert numbers.get("tau") > 6


def test_unknown_name_error_suggests_a_component_of_the_same_module() -> None:
    numbers: Registry[float] = Registry("number", group="my.numbers", wants="a tau", fits=has("hex"))
    with pytest.raises(UnknownNameError, match=r"not a tau\. Did you mean math:pi or math:e or math:tau\?$"):
        numbers.get("math:cos")
