"""YAML of settings."""

from pathlib import Path

import pytest

from embodyrl.config import tree
from embodyrl.errors import ConfigError


def test_yaml_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1e-4\nb: 2026-08-23\nc: .5\nd: 1_000\ne: [true, ~, 'no', -inf, .nan]\n1: x\n")
    found = tree.read_plain_yaml(file)
    assert repr(found) == (
        "{'a': 0.0001, 'b': '2026-08-23', 'c': 0.5, 'd': 1000, 'e': [True, None, 'no', '-inf', nan], 1: 'x'}"
    )
    for text, fragment in (
        ("a: 1\na: 2\n", "a is there twice"),
        ("a: " + "[" * 5000, "levels"),
        ("- " * 5000, "levels"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=fragment):
            tree.read_plain_yaml(file)
