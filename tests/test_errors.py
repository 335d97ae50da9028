"""Error messages for users."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embodyrl import errors


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_user_errors_are_not_python_errors(kind: type) -> None:
    """`except ValueError` around a parser would replace a helpful message."""
    if issubclass(kind, errors.EmbodyError):
        assert not issubclass(kind, ValueError | KeyError | TypeError | OSError | RuntimeError)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("q99"), "no field 'q99'"),
        (TypeError("'float' object\n is not iterable"), "'float' object is not iterable"),
        (ValueError(), "ValueError"),
    ],
)
def test_reason_of_a_third_party_error_is_its_message(error: Exception, words: str) -> None:
    assert errors.format_reason(error) == words


def test_error_messages_contain_no_exception_repr() -> None:
    package = Path(errors.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "error!r}" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("No module named 'robosuite'", r"pip install 'embodyrl\[libero\]'$"),
        ("libxcb.so.1: cannot open shared object file: No such file or directory", "apt-get install libxcb1 "),
    ],
)
def test_missing_system_library_error_does_not_suggest_pip(reason: str, fix: str) -> None:
    error = errors.MissingDependencyError.from_import_error(
        "LIBERO", ImportError(reason), "pip install 'embodyrl[libero]'"
    )
    assert re.search(f"Fix: {fix}", str(error))
