"""Errors for users reach them as they are."""

from __future__ import annotations

import pytest

from embodyrl import errors


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_no_error_for_users_is_caught_with_those_of_python(kind: type) -> None:
    """`except ValueError` around a parser would replace a helpful message by its own."""
    if issubclass(kind, errors.EmbodyError):
        assert not issubclass(kind, ValueError | KeyError | TypeError | OSError | RuntimeError)
