"""Examples in docstrings print the results that they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for path in sorted((ROOT / "embodyrl").rglob("*.py")) if "\n    >>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_docstring_examples(file):
    result = doctest.testmod(importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)))
    assert result.attempted
    assert not result.failed
