"""Warnings about observations that are valid but probably not intended."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import FrameStackObservation

from embodyrl.envs.check.info_warnings import MASK_NOT_APPLIED, MASK_PATTERN
from embodyrl.envs.gym.api import begin_episode
from embodyrl.envs.gym.create import find_running_statistics
from embodyrl.envs.gym.spaces import copy_observation, format_path, get_frame_shape, get_member, is_text, iterate_leaves

_MAX_EXACT_INTEGER = 2**24
"""Largest absolute value up to which float32 represents every integer exactly."""
_MIN_CHANGE = 1e-6
"""Changes of a value above this threshold cause a warning if they are lost in float32."""
_MIN_IMAGE_SIZE = 32
"""Minimum height and width of an array that is probably a grayscale image."""


def get_observation_warnings(space: Space[Any], observations: Sequence[Any], env: Any) -> Iterator[str]:
    """Yield warnings about `observations`, the observations of one episode in order, starting at the reset."""
    stacked = _has_frame_stack(env)
    for path, leaf in iterate_leaves(space, ()):
        name = format_path(path)
        if is_text(leaf):
            if len({str(get_member(observation, path)) for observation in observations}) > 1:
                yield f"'{name}' changes within an episode; policies receive only the text of the reset"
            continue
        if MASK_PATTERN.search(name):
            yield f"'{name}' is part of the state and is not applied to actions: {MASK_NOT_APPLIED}"
        if not isinstance(leaf, spaces.Box):
            continue
        values = [np.asarray(get_member(observation, path)) for observation in observations]
        if any(value.shape != leaf.shape or value.dtype.kind not in "fiub" for value in values):
            continue
        if not values[0].size:
            yield f"'{name}' {leaf.shape} is empty; fix: leave it out with a wrapper in env.wrappers"
            continue
        yield from _bounds_warnings(name, leaf, values[0])
        yield from _precision_warnings(name, values)
        yield from _image_warnings(name, leaf, values, stacked)
    yield from _seeding_warnings(space, observations[0], env)


def _seeding_warnings(space: Space[Any], first: Any, env: Any) -> Iterator[str]:
    """Warn if a second reset with the same seed returns a different observation."""
    if isinstance(env, VectorEnv) or find_running_statistics(env):
        return
    wrapper = ""
    try:
        if _reset_repeats(space, first, env):
            return
        while (inner := getattr(env, "env", None)) is not None:
            if _reset_repeats(inner.observation_space, _reset(inner), inner):
                wrapper = f"'{type(env).__name__}' keeps state between episodes: "
                break
            env = inner
    except Exception:
        return  # reported when episodes run
    yield (
        f"{wrapper}two resets with the same seed return different observations, so episodes of a group differ in their "
        "initial state, and runs cannot be repeated; fix: "
        + ("reset this state in reset()" if wrapper else "sample from self.np_random after super().reset(seed=seed)")
    )


def _reset(env: Any) -> Any:
    return copy_observation(env.observation_space, begin_episode("", env, 0)[0])


def _reset_repeats(space: Space[Any], first: Any, env: Any) -> bool:
    """Return True if a reset with the same seed returns the observation `first` again."""
    observations = first, _reset(env)
    return all(
        _are_close(*(np.asarray(get_member(observation, path)) for observation in observations))
        for path, _ in iterate_leaves(space, ())
    )


def _are_close(first: np.ndarray, second: np.ndarray) -> bool:
    """Return True if two arrays are equal except for rounding."""
    if first.dtype.kind not in "fiub":
        return np.array_equal(first, second)
    return first.shape == second.shape and bool(np.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True))


def _bounds_warnings(name: str, leaf: spaces.Box, first: np.ndarray) -> Iterator[str]:
    # A float32 bound and a float64 value may differ by a rounding error.
    slack = 1e-6 * np.maximum(1.0, np.abs(first, dtype=np.float64))
    outside = first[(first < leaf.low - slack) | (first > leaf.high + slack)]
    if outside.size:
        yield f"'{name}' is {outside.flat[0]:g} after reset, outside of its space {leaf!s:.60}; fix: correct the bounds"


def _precision_warnings(name: str, values: Sequence[np.ndarray]) -> Iterator[str]:
    """Warn about values that lose precision in float32, the dtype of observations."""
    if values[0].dtype.itemsize < 4 or values[0].dtype == np.float32:
        return
    for previous, value in zip((values[0], *values), values, strict=False):
        with np.errstate(over="ignore", invalid="ignore"):
            change = np.abs(value.astype(np.float64) - previous.astype(np.float64))
            lost = (np.abs(value.astype(np.float64)) > _MAX_EXACT_INTEGER) & np.isfinite(value)
            lost |= (change > _MIN_CHANGE) & (value.astype(np.float32) == previous.astype(np.float32))
        if lost.any():
            yield (
                f"'{name}' has {value[lost].flat[0]}, and observations are float32, which keeps 7 digits: small "
                "changes are lost; fix: subtract an offset or scale it with a wrapper in env.wrappers"
            )
            return


def _image_warnings(name: str, leaf: spaces.Box, values: Sequence[np.ndarray], stacked: bool) -> Iterator[str]:
    shape, size = leaf.shape, values[0].size
    if leaf.dtype == np.uint8:
        if leaf.low.any() or (leaf.high != 255).any():
            if len(shape) > 2 and sorted(shape)[-2] >= _MIN_IMAGE_SIZE:
                yield (
                    f"'{name}' {shape} looks like an image, but its bounds are {leaf.low.min()}..{leaf.high.max()}, so "
                    f"it becomes {size} numbers of the state; fix: low=0, high=255, for model=cnn"
                )
        elif len(shape) > 2 and get_frame_shape(leaf) is None:
            yield (
                f"'{name}' {shape} looks like images whose channels are not last, which become {size} numbers of "
                "the state; fix: [H, W, 3], or a stack [n, H, W, 3] of these, for model=cnn"
            )
        elif not stacked:
            yield from _channel_warnings(name, shape, values)
        return
    smallest, *larger = sorted(shape) or [0]
    if len(larger) == 2 and smallest <= 4 <= larger[0] // 2:
        description = "an image of real numbers" if leaf.dtype.kind == "f" else f"a {leaf.dtype} image"
    elif len(shape) == 2 and smallest >= _MIN_IMAGE_SIZE and leaf.dtype.kind in "fiu":
        description = f"a {leaf.dtype} image of depths"
    else:
        return
    if leaf.dtype.kind in "fiu":
        yield (
            f"'{name}' {shape} looks like {description}, which becomes {size} numbers of the state; fix: uint8 in "
            "0..255, [H, W, 3], for model=cnn"
        )


def _channel_warnings(name: str, shape: tuple[int, ...], values: Sequence[np.ndarray]) -> Iterator[str]:
    """Warn about color channels that would be read as stacked frames.

    Real stacked frames shift by one position in each step.
    """
    if len(shape) != 3 or shape[-1] in (1, 3):
        return
    yield from _stack_warnings(name, shape, values)
    channels_first = shape[0] in (3, 4) and shape[0] < min(shape[1:])
    axis = 0 if channels_first else -1
    if (not channels_first and shape[-1] != 4) or _are_shifted(values, axis, 1):
        return
    frames = [np.moveaxis(value, axis, 0) for value in values]
    opaque = all((frame[-1] == 255).all() for frame in frames)
    if shape[axis] == 4 and not opaque:
        # After a reset, a stack repeats one frame or is empty.
        is_static = all(np.array_equal(frame, frames[0]) for frame in frames)
        repeats_frame = np.ptp(frames[0][0]) and (frames[0][1:] == frames[0][0]).all()
        if channels_first or (is_static and repeats_frame):
            return
    kind = "RGBA" if shape[axis] == 4 else "RGB"
    fix = "transposes it to [H, W, 3]" if channels_first and kind == "RGB" else "makes it [H, W, 3]"
    yield (
        f"'{name}' {shape} is read as {shape[axis]} gray cameras and looks like one {kind} image"
        f"{' with its channels first' if channels_first else ''}; fix: a function in env.wrappers that "
        f"{fix} (gymnasium.wrappers.TransformObservation); ignore this for a stack of frames"
    )


def _stack_warnings(name: str, shape: tuple[int, ...], values: Sequence[np.ndarray]) -> Iterator[str]:
    """Warn about stacked RGB images [3n, H, W] or [H, W, 3n], which shift by three channels in each step."""
    axis = int(np.argmin(shape))
    count, remainder = divmod(shape[axis], 3)
    if count < 2 or remainder or axis == 1:
        return
    if _are_shifted(values, axis, 3) and not _are_shifted(values, axis, 1):
        yield (
            f"'{name}' {shape} is read as {shape[axis]} gray cameras and looks like {count} RGB images; fix: a "
            "function in env.wrappers that makes it [n, H, W, 3] (gymnasium.wrappers.TransformObservation)"
        )


def _are_shifted(values: Sequence[np.ndarray], axis: int, count: int) -> bool:
    """Return True if images change, and every change shifts the channels (`axis`) by `count`."""
    frames = [np.moveaxis(value, axis, 0) for value in values]
    changed_pairs = [(a, b) for a, b in itertools.pairwise(frames) if not np.array_equal(a, b)]
    return bool(changed_pairs) and all(np.array_equal(a[count:], b[:-count]) for a, b in changed_pairs)


def _has_frame_stack(env: Any) -> bool:
    """Return True if one of the environment's wrappers stacks frames."""
    while env is not None:
        if isinstance(env, FrameStackObservation):
            return True
        env = getattr(env, "env", None)
    return False
