"""Add shared test doubles to the import path, and check that tests leave no process or file behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import MARK, marked_processes, wait_until

os.environ[MARK] = str(os.getpid())
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a mistyped path is never looked for on the network


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the imported modules from garbage collections, which take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test: no process of the test, no shared memory of embodyrl, no file in its TMPDIR."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = [*marked_processes(), *map(str, Path("/dev/shm").glob(f"embodyrl*{os.getpid()}*"))]
        return not left

    found = [] if wait_until(nothing_left, 5.0) else [*left]
    for process in found:  # so that later tests are not blamed
        if (pid := process.split()[0]).isdigit():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        else:
            Path(process).unlink(missing_ok=True)
    assert not found, f"{request.node.name} left behind: {found}"
    files = [] if folder is None else [*(folder / "tmp").glob("*"), *folder.rglob("*.tmp"), *folder.rglob(".tmp-*")]
    assert not files
