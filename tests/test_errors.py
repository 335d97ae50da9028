"""Errors for users reach them as they are."""

from __future__ import annotations

import pytest

from embodyrl import errors


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_user_errors_are_not_python_errors(kind: type) -> None:
    """`except ValueError` around a parser would replace a helpful message by its own."""
    if issubclass(kind, errors.EmbodyError):
        assert not issubclass(kind, ValueError | KeyError | TypeError | OSError | RuntimeError)
