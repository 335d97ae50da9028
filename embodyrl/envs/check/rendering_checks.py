"""Checks of `check-env` on images, rendering, speed, and the threads and processes left after `close`."""

import time

import numpy as np

from embodyrl.envs.check.harness import CHUNK_LENGTH, Harness, check, describe_observation_difference
from embodyrl.errors import EnvError, NoImageError
from embodyrl.isolation import wait_for_leftovers

MEASURED_STEPS = 64
CLOSE_SECONDS = 1.0
"""Maximum time for threads and child processes to exit after `close`, in seconds."""


@check("step")
def image_range(harness: Harness) -> None:
    """Check that pixels use the range 0..255."""
    actual = f"no value above {harness.max_pixel}; floats in 0..1 truncated to integers?"
    harness.expect(
        not harness.spec.cameras.names or harness.max_pixel > 1, "observe: images", "uint8 in 0..255", actual
    )


@check("step")
def render(harness: Harness) -> None:
    """Check that `render` returns an upright frame and has no side effect."""
    harness.run_episode(0, harness.make_first_start(), harness.sample_actions(CHUNK_LENGTH))
    observation_before = harness.observe(0)
    try:
        frame = harness.env.render(0)
    except EnvError as error:
        if harness.spec.cameras.names:
            raise
        harness.note = str(error)
        harness.warn_unless(isinstance(error, NoImageError), "render", "uint8 (H, W, 3)", error)
        return
    is_array = isinstance(frame, np.ndarray)
    is_frame = is_array and frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8
    actual = f"{frame.dtype} {frame.shape}" if is_array else type(frame).__name__
    if not harness.expect(is_frame, "render", "uint8 (H, W, 3)", actual):
        return
    difference = describe_observation_difference(observation_before, harness.observe(0))
    harness.expect(difference is None, "render", "no change of the observation", difference)
    for camera, image in zip(harness.spec.cameras.names, observation_before.images, strict=True):
        upside_down = image if harness.spec.cameras.rotation_deg == 180 else image[::-1]
        is_flipped = np.array_equal(frame, upside_down) and not np.array_equal(frame, upside_down[::-1])
        expected = f"upright (spec.cameras.rotation_deg={harness.spec.cameras.rotation_deg})"
        harness.expect(not is_flipped, "render", expected, f"the image of camera '{camera}' upside down")
    harness.note = f"{frame.shape[0]}x{frame.shape[1]}"


@check("time_limit")
def speed(harness: Harness) -> None:
    """Measure the speed of the environment; this check always passes."""
    start = harness.make_first_start(limit=MEASURED_STEPS, ignore=True)
    harness.env.reset([0], [start])
    started = time.perf_counter()
    steps = int(harness.env.step_chunk([0], harness.sample_actions(MEASURED_STEPS)[None]).valid.sum())
    steps_end = time.perf_counter()
    for _ in range(CHUNK_LENGTH):
        harness.observe(0)
    observations_end = time.perf_counter()
    harness.env.reset([0], [start])
    harness.note = (
        f"{steps / (steps_end - started):.0f} steps/s without observing, "
        f"{1000 * (observations_end - steps_end) / CHUNK_LENGTH:.2f} ms per observation, "
        f"{1000 * (time.perf_counter() - observations_end):.2f} ms per reset (one environment)"
    )


@check("make")
def close(harness: Harness) -> None:
    """Check that `close` stops all threads and child processes, and can be called twice."""
    harness.env.close()
    harness.env.close()
    remaining = wait_for_leftovers(CLOSE_SECONDS, harness.threads, harness.children)
    harness.warn_unless(not remaining, "close", "no remaining threads (except daemons) and child processes", remaining)
