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

from needs import absent, needed_by, needed_by_folder
from processes import MARK, marked_processes, wait_until

os.environ[MARK] = str(os.getpid())
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a mistyped path is never looked for on the network


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="run only tests that need no extension")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--core"):
        return None
    is_test = collection_path.is_dir() or collection_path.name.startswith("test_")
    return True if is_test and needed_by(collection_path) else None


class _WithoutExtension:
    """Skip a file or a folder before it is imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs {', '.join(absent(needed_by(self.path)))}, which this tree lacks", allow_module_level=True)


class _Folder(_WithoutExtension, pytest.Dir):
    pass


class _File(_WithoutExtension, pytest.Module):
    pass


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return _Folder.from_parent(parent, path=path) if absent(needed_by_folder(path)) else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _File.from_parent(parent, path=module_path) if absent(needed_by(module_path)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in list(items):
        needed = {name for mark in item.iter_markers("needs") for name in mark.args}
        if needed and config.getoption("--core"):
            left_out.append(item)
            items.remove(item)
        elif lacking := absent(needed):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(lacking)}, which this tree lacks"))
    config.hook.pytest_deselected(items=left_out)


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
