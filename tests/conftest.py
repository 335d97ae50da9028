"""Shared test doubles live beside this file; make them importable. No test may leave a process or a file behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import MARK, marked_processes, wait_until

os.environ[MARK] = str(os.getpid())
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a mistyped path is never looked for on the network


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no process that it started, no shared memory of ours, no file in its own TMPDIR."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = [*marked_processes(), *map(str, Path("/dev/shm").glob(f"embodyrl*{os.getpid()}*"))]
        return not left

    assert wait_until(nothing_left, 5.0), f"{request.node.name} left behind: {left}"
    files = [] if folder is None else [*(folder / "tmp").glob("*"), *folder.rglob("*.tmp"), *folder.rglob(".tmp-*")]
    assert not files
