"""Checks of `check-env` on images, rendering, speed, and the threads and processes left after `close`."""

import time

import numpy as np

from embodyrl.envs.check.harness import CHUNK, Harness, check, seen_difference
from embodyrl.errors import EnvError, NoImageError
from embodyrl.isolation import left_after

MEASURED_STEPS = 64
CLOSE_SECONDS = 1.0
"""Maximum time for threads and child processes to exit after `close`, in seconds."""


@check("step")
def image_range(h: Harness) -> None:
    """Check that pixels use the range 0..255."""
    found = f"no value above {h.brightest}; floats in 0..1 truncated to integers?"
    h.expect(not h.spec.cameras.names or h.brightest > 1, "observe: images", "uint8 in 0..255", found)


@check("step")
def render(h: Harness) -> None:
    """Check that `render` returns an upright frame and has no side effect."""
    h.play(0, h.first_start(), h.actions(CHUNK))
    before = h.observe(0)
    try:
        frame = h.env.render(0)
    except EnvError as error:
        if h.spec.cameras.names:
            raise
        h.note = str(error)
        h.prefer(isinstance(error, NoImageError), "render", "uint8 (H, W, 3)", error)
        return
    is_array = isinstance(frame, np.ndarray)
    drawn = is_array and frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8
    found = f"{frame.dtype} {frame.shape}" if is_array else type(frame).__name__
    if not h.expect(drawn, "render", "uint8 (H, W, 3)", found):
        return
    h.expect_equal(seen_difference(before, h.observe(0)), "render", "no change of the observation")
    for camera, image in zip(h.spec.cameras.names, before.images, strict=True):
        upside_down = image if h.spec.cameras.rotation_deg == 180 else image[::-1]
        wrong = np.array_equal(frame, upside_down) and not np.array_equal(frame, upside_down[::-1])
        expected = f"upright (spec.cameras.rotation_deg={h.spec.cameras.rotation_deg})"
        h.expect(not wrong, "render", expected, f"the image of camera '{camera}' upside down")
    h.note = f"{frame.shape[0]}x{frame.shape[1]}"


@check("time_limit")
def speed(h: Harness) -> None:
    """Measure the speed of the environment; this check always passes."""
    start = h.first_start(limit=MEASURED_STEPS, ignore=True)
    h.env.reset([0], [start])
    started = time.perf_counter()
    steps = int(h.env.step_chunk([0], h.actions(MEASURED_STEPS)[None]).valid.sum())
    stepped = time.perf_counter()
    for _ in range(CHUNK):
        h.observe(0)
    seen = time.perf_counter()
    h.env.reset([0], [start])
    h.note = (
        f"{steps / (stepped - started):.0f} steps/s without observing, "
        f"{1000 * (seen - stepped) / CHUNK:.2f} ms per observation, "
        f"{1000 * (time.perf_counter() - seen):.2f} ms per reset (one slot)"
    )


@check("make")
def close(h: Harness) -> None:
    """Check that `close` stops all threads and child processes, and can be called twice."""
    h.env.close()
    h.env.close()
    left = left_after(CLOSE_SECONDS, h.threads, h.children)
    h.prefer(not left, "close", "no threads (other than daemons) and child processes left", left)
