"""GPU check of LIBERO: time of an action chunk, with physics and rendering measured separately."""

import os
import time
from collections.abc import Callable

import numpy as np

from embodyrl.devices import visible_gpus
from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import EGL_RENDER_S, PHYSICS_S, chunk_name
from embodyrl.envs.settings import RenderProfile
from embodyrl_gpu_check.result import GpuParts, GpuResult

_SUITE, _CHUNK, _CHUNKS = "libero_10", 8, 3
_MAX_RATIO = 1.5
"""Ratio of measured to assumed time above which a warning is reported."""


def check_chunk() -> GpuResult:
    """Step and render one task with each of the two physics loops.

    Raises:
        MissingDependencyError: LIBERO, the OpenGL library or the assets are missing.
    """
    install.check_installation()
    install.prepare_process()
    parts, lines = GpuParts(), list[str]()
    on_gpu = os.environ.get("MUJOCO_GL") == "egl" and bool(visible_gpus())
    parts.record("MUJOCO_GL", os.environ.get("MUJOCO_GL"))
    for fast in (True, False):
        with parts.part(f"{'fast' if fast else 'stock'} physics"):
            lines.append(_measure(parts, fast=fast, on_gpu=on_gpu))
    return parts.result("; ".join(lines))


def _measure(parts: GpuParts, *, fast: bool, on_gpu: bool) -> str:
    from embodyrl.envs.libero.simulator import FRONT_CAMERA, TaskSimulator

    task = install.get_suite_tasks(_SUITE)[0]
    name = chunk_name(RenderProfile.full, fast=fast, on_gpu=on_gpu)
    free = _get_free_memory(on_gpu)
    started = time.perf_counter()
    path = install.get_libero_path("bddl_files") / task.problem_folder / task.bddl_file
    simulator = TaskSimulator(path, fast=fast)
    try:
        parts.record(f"{name}: seconds to load", round(time.perf_counter() - started, 2))
        simulator.reset(install.load_init_states(_SUITE, 0)[0], 0)
        images, state = np.zeros((1, 224, 224, 3), np.uint8), np.zeros(8, np.float32)
        action = np.array([0.2, 0.0, -0.2, 0.0, 0.0, 0.0, -1.0])

        def step() -> None:
            for _ in range(_CHUNK):
                simulator.step(action)

        def render() -> None:
            simulator.observe((FRONT_CAMERA,), images, state)

        render()
        step_times = [_measure_times(step) for _ in range(_CHUNKS)]
        render_times = [_measure_times(render) for _ in range(2 * _CHUNKS)]
        if used := free - _get_free_memory(on_gpu):
            parts.record(f"{name}: MiB of the GPU for context and task", round(used / 2**20, 1))
    finally:
        simulator.close()
    # A worker waits for the GPU while it renders: the time of a frame is that of the clock.
    physics, (frame_cpu, frame) = min(step_times)[0], min(render_times)
    parts.record(f"{name}: CPU seconds of the physics of {_CHUNK} actions", round(physics, 4))
    parts.record(f"{name}: CPU and wall seconds of a frame", [round(frame_cpu, 4), round(frame, 4)])
    parts.measured[name] = {"chunk_s": physics + frame}
    assumed = PHYSICS_S[fast] + EGL_RENDER_S
    if on_gpu and physics + frame > _MAX_RATIO * assumed:
        parts.warnings.append(f"{name}: {physics + frame:.3f} s instead of {assumed:.3f}")
    return f"{name}: {physics:.3f} s of physics and {frame:.3f} s a frame"


def _measure_times(call: Callable[[], None]) -> tuple[float, float]:
    """Return the CPU seconds and the wall-clock seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def _get_free_memory(on_gpu: bool) -> int:
    from embodyrl.devices import Gpus

    return Gpus().free if on_gpu else 0
