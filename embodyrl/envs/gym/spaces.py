"""Conversion between Gymnasium's spaces and flat arrays.

Observations: an image (uint8; [H, W, 3], gray [H, W, 1] or [H, W], or a stack [n, ...] of such images, for gray images
also [H, W, n]) becomes a camera, or n cameras. All other parts are concatenated to the state vector: numbers unchanged,
categories one-hot; members of Dict and Tuple in their space's order. Texts are instructions.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import ActionKind, ActionSpec, ByteArray, FloatArray, ObservationOut

Path = tuple[str | int, ...]
_Frames = tuple[int, int, int, int]
"""(number of frames, height, width, channels) of an image space; channels are 1 or 3."""

_MAX_ACTION_VALUES = 1024
"""Maximum number of values of an action dimension in an integer Box."""
_UNBOUNDED = 1e30
"""Action bounds of at least this magnitude are treated as infinite."""
_CATEGORIES = (spaces.Discrete, spaces.MultiDiscrete)


class ObservationWriter:
    """Converter of the observations of one space to images and a state vector.

    Without images, `image_size` is (0, 0).
    """

    def __init__(self, env_id: str, space: Space[Any]) -> None:
        """Assign each part of the observation space to cameras, state columns or texts.

        Raises:
            ConfigError: a part of the space is not supported, or images differ in size.
        """
        self._env_id = env_id
        self._images: list[tuple[Path, Space[Any], _Frames, slice]] = []
        self._parts: list[tuple[Path, Space[Any], slice]] = []
        self.texts: list[tuple[str, Path]] = []
        """Name and path of each text space."""
        self.text_bytes = 0
        """Maximum number of UTF-8 bytes of a text, from the limits of the text spaces."""
        cameras: list[str] = []
        sizes: set[tuple[int, int]] = set()
        self.state_dim = 0
        for path, leaf in iterate_leaves(space, ()):
            name = format_path(path)
            if is_text(leaf):
                self.texts.append((name, path))
                self.text_bytes = max(self.text_bytes, _get_text_bytes(leaf))
                continue
            if (frames := get_frame_shape(leaf)) is not None:
                self._images.append((path, leaf, frames, slice(len(cameras), len(cameras) + frames[0])))
                cameras += [name] if frames[0] == 1 else [f"{name}.{i}" for i in range(frames[0])]
                sizes.add(frames[1:3])
                continue
            width = _get_width(env_id, name, leaf)
            self._parts.append((path, leaf, slice(self.state_dim, self.state_dim + width)))
            self.state_dim += width
        if len(sizes) > 1:
            raise ConfigError(
                f"env.id={env_id}: images have different sizes {sorted(sizes)}. Resize them with a wrapper in "
                f"env.wrappers."
            )
        if not self.state_dim and not any(map(min, sizes)):
            raise ConfigError(
                f"env.id={env_id}: {space} has neither numbers nor images. Fix: add observations, for example with a "
                "wrapper in env.wrappers."
            )
        self.cameras = tuple(cameras)
        self.image_size = next(iter(sizes), (0, 0))
        self.grey = bool(cameras) and all(frames[3] == 1 for _, _, frames, _ in self._images)

    def get_columns(self, name: str) -> tuple[int, int]:
        """Return the state columns (start, stop) of a key of a Dict space; (0, 0) if the key has no columns."""
        return next(
            ((part_columns.start, part_columns.stop) for path, _, part_columns in self._parts if path == (name,)),
            (0, 0),
        )

    def write(self, observation: Any, out: ObservationOut) -> None:
        """Write one observation into the arrays of `out`.

        Raises:
            EnvError: a shape or a category does not match the space.
        """
        for path, leaf, frames, rows in self._images:
            out.images[rows] = _split_frames(self._get_image(path, leaf, self._get_member(observation, path)), frames)
        for path, leaf, columns in self._parts:
            out.state[columns] = self._flatten(path, leaf, self._get_member(observation, path))

    def check(self, observation: Any) -> None:
        """Check an observation against the space, with the same errors as `write`."""
        out = ObservationOut(
            images=np.zeros((len(self.cameras), *self.image_size, 3), np.uint8),
            state=np.zeros(self.state_dim, np.float32),
        )
        self.write(observation, out)

    def _get_member(self, observation: Any, path: Path) -> Any:
        try:
            return get_member(observation, path)
        except (KeyError, IndexError, TypeError):
            raise EnvError(
                f"env '{self._env_id}' returned no '{format_path(path)}', a member of its observation space. Fix: "
                "return all members of the space."
            ) from None

    def get_latest_frame(self, observation: Any) -> np.ndarray:
        """Return the newest frame [H, W, 3] of the first image space."""
        path, leaf, frames, _ = self._images[0]
        pixels = self._get_image(path, leaf, get_member(observation, path))
        return np.broadcast_to(_split_frames(pixels, frames)[-1], (*self.image_size, 3))

    def _get_image(self, path: Path, leaf: Space[Any], value: Any) -> ByteArray:
        array = self._check_array(path, value, leaf)
        if array.dtype == np.uint8 or not array.size:
            return array
        low, high = array.min(), array.max()
        if low < 0 or high > 255 or (array.dtype.kind in "fb" and 0 < high <= 1):
            raise EnvError(
                f"env '{self._env_id}' returned {array.dtype} values in {low:g}..{high:g} for the uint8 image "
                f"'{format_path(path)}', expected 0..255. Fix: convert it, for example (255 * image).astype(np.uint8)."
            )
        return array.astype(np.uint8)

    def _flatten(self, path: Path, leaf: Space[Any], value: Any) -> np.ndarray:
        if not isinstance(leaf, _CATEGORIES):
            # Not `spaces.flatten`, which wraps values outside of the space's dtype and takes longer.
            return self._check_array(path, value, leaf).ravel()
        if not leaf.contains(value):
            raise EnvError(
                f"env '{self._env_id}' returned category {value} in '{format_path(path)}', expected a value of {leaf}."
            )
        return np.asarray(spaces.flatten(leaf, value), np.float32)

    def _check_array(self, path: Path, value: Any, leaf: Space[Any]) -> np.ndarray:
        array, shape = np.asarray(value), leaf.shape
        is_integer = leaf.dtype is not None and leaf.dtype.kind in "biu"
        if array.shape != shape:
            raise EnvError(
                f"env '{self._env_id}' returned shape {array.shape} in '{format_path(path)}', but its observation "
                f"space declares {shape}."
            )
        if array.dtype.kind not in "biuf":
            raise EnvError(
                f"env '{self._env_id}' returned {value!r:.80} in '{format_path(path)}', expected real numbers."
            )
        if is_integer and array.dtype.kind == "f" and not np.isfinite(array).all():
            # The conversion of an image to integers would hide NaN and infinity.
            raise EnvError(
                f"env '{self._env_id}' returned {value!r:.80} in '{format_path(path)}', expected finite numbers."
            )
        return array


def _get_categories(space: Space[Any]) -> tuple[np.ndarray, Any] | None:
    """Return the number of categories of each discrete action dimension [A], and the smallest values.

    Returns None if actions are real numbers or the space is not supported.
    """
    match space:
        case spaces.Discrete():
            return np.array([space.n]), space.start
        case spaces.MultiDiscrete():
            return space.nvec.reshape(-1), space.start
        case spaces.MultiBinary():
            return np.full(spaces.flatdim(space), 2), 0
        case spaces.Box() if np.issubdtype(space.dtype, np.integer):
            counts = space.high.astype(np.float64) - space.low + 1
            if (counts <= _MAX_ACTION_VALUES).all():
                return counts.astype(np.int64).reshape(-1), space.low.astype(np.int64)
    return None


def convert_action_space(env_id: str, space: Space[Any]) -> ActionSpec:
    """Convert a Gymnasium action space to an ActionSpec.

    Raises:
        ConfigError: the space is not supported, or has no dimensions.
    """
    if space.shape is not None and 0 in space.shape:
        raise ConfigError(f"env.id={env_id}: the action space {space} is empty, expected at least one dimension.")
    if (categories := _get_categories(space)) is not None:
        kind = ActionKind.discrete if isinstance(space, spaces.Discrete) else ActionKind.multi_discrete
        sizes = tuple(map(int, categories[0]))
        return ActionSpec(dim=len(sizes), kind=kind, sizes=sizes)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        bounds = (bound.astype(np.float64).reshape(-1) for bound in (space.low, space.high))
        # Some environments declare the largest float instead of infinity.
        low, high = (
            np.where(np.abs(values) < _UNBOUNDED, values, np.copysign(np.inf, values)).tolist() for values in bounds
        )
        return ActionSpec(dim=len(low), low=tuple(low), high=tuple(high))
    raise ConfigError(
        f"env.id={env_id}: actions of {space} are not supported. Convert the space to Discrete, MultiDiscrete, "
        f"MultiBinary or Box (floats, or integers with up to {_MAX_ACTION_VALUES} values) with a wrapper in "
        "env.wrappers."
    )


def make_action_converter(env_id: str, space: Space[Any]) -> Callable[[FloatArray], Any]:
    """Return a function that converts an action [A] to the argument of `step`; floats are clipped to the box.

    The function raises EnvError for a category that does not exist.
    """
    shape, dtype = space.shape, space.dtype
    assert dtype is not None
    if (categories := _get_categories(space)) is None:
        assert isinstance(space, spaces.Box)
        low, high = space.low, space.high
        # `np.clip` takes three times as long.
        return lambda action: np.minimum(np.maximum(action.reshape(shape).astype(dtype), low), high)
    sizes, starts = categories

    # Actions are stored as float32, including categories.
    def convert(action: FloatArray) -> Any:
        ids = np.rint(action).astype(np.int64)
        if ((ids < 0) | (ids >= sizes)).any():
            raise EnvError(
                f"env '{env_id}' received action {ids.tolist()}, expected ids from 0 to {(sizes - 1).tolist()}."
            )
        return (ids.reshape(shape) + starts).astype(dtype)

    return convert


def make_action_flattener(env_id: str, space: Space[Any]) -> Callable[[Any], FloatArray]:
    """Return a function that converts an action of the space to an array [A], the inverse of `make_action_converter`.

    The function raises EnvError for an invalid action.
    """
    categories = _get_categories(space)
    starts = 0 if categories is None else categories[1]

    def convert(action: Any) -> FloatArray:
        array = np.asarray(action)
        if array.shape != space.shape or not np.isfinite(array).all():
            raise EnvError(f"env '{env_id}': expert_action returned {action!r:.80}, expected an action of {space}.")
        return (array - starts).astype(np.float32).reshape(-1)

    return convert


def iterate_leaves(space: Space[Any], path: Path) -> Iterator[tuple[Path, Space[Any]]]:
    """Yield (path, space) of each leaf of nested Dict and Tuple spaces."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from iterate_leaves(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from iterate_leaves(part, (*path, index))
    else:
        yield path, space


def get_frame_shape(space: Space[Any]) -> _Frames | None:
    """Return the number of frames, height, width and channels of an image space, or None for other spaces."""
    shape = [*(space.shape or ())]
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
        return None
    if space.low.any() or (space.high != 255).any():
        return None  # a board or a map, whose values are not colors
    if len(shape) == 3 and shape[-1] not in (1, 3) and shape[-1] < min(shape[:2]):
        shape.insert(0, shape.pop())  # frames come last
    if len(shape) == 2 or shape[-1] not in (1, 3):
        shape.append(1)
    if len(shape) == 3:
        shape.insert(0, 1)
    return (shape[0], shape[1], shape[2], shape[3]) if len(shape) == 4 else None


def _split_frames(image: np.ndarray, frames: _Frames) -> np.ndarray:
    """Reshape an image to [n, H, W, 1 or 3]."""
    frames_last = frames[3] == 1 and image.ndim == 3 and image.shape[:2] == frames[1:3]
    return (np.moveaxis(image, -1, 0) if frames_last else image).reshape(frames)


def is_text(space: Space[Any]) -> bool:
    """Return True for a text space, including text spaces of other packages such as MiniGrid's MissionSpace."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U")


_MAX_CATEGORIES = 2**16
"""Maximum number of values of a categorical observation; each value is one column of the one-hot state."""
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
"""Keys of the goals in the observation of a goal environment (Gymnasium-Robotics' GoalEnv)."""
MIN_TEXT_BYTES = 512
"""Minimum number of UTF-8 bytes reserved for an instruction."""


def _get_text_bytes(space: Space[Any]) -> int:
    if not isinstance(space, spaces.Text):
        return MIN_TEXT_BYTES
    character_bytes = max(
        (len(character.encode("utf-8", errors="replace")) for character in space.character_set), default=1
    )
    return min(4096, character_bytes * space.max_length)


def _get_width(env_id: str, name: str, space: Space[Any]) -> int:
    if isinstance(space, (spaces.Box, spaces.MultiBinary, *_CATEGORIES)):
        if isinstance(space, _CATEGORIES) and (width := spaces.flatdim(space)) > _MAX_CATEGORIES:
            raise ConfigError(
                f"env.id={env_id}: '{name}' is {space}, whose one-hot state would have {width} numbers (at most "
                f"{_MAX_CATEGORIES}). Convert it to numbers with a wrapper in env.wrappers, for example "
                "gymnasium.wrappers.TransformObservation."
            )
        return spaces.flatdim(space)
    raise ConfigError(
        f"env.id={env_id}: '{name}' is {space}, which has neither numbers nor an image. Remove it with a wrapper in "
        f"env.wrappers, for example a function that returns gymnasium.wrappers.FilterObservation."
    )


def get_member(observation: Any, path: Path) -> Any:
    """Return the part of a nested observation at a path of keys and indices."""
    for key in path:
        observation = observation[key]
    return observation


def copy_observation(space: Space[Any], observation: Any) -> Any:
    """Copy the members of an observation that the space declares, because other members may not be copyable."""
    if isinstance(space, spaces.Dict) and isinstance(observation, Mapping):
        return {
            key: copy_observation(part, observation[key]) for key, part in space.spaces.items() if key in observation
        }
    if isinstance(space, spaces.Tuple) and isinstance(observation, (tuple, list)):
        return tuple(copy_observation(part, item) for part, item in zip(space.spaces, observation, strict=False))
    return copy.deepcopy(observation)


def format_path(path: Path) -> str:
    """Return a path of keys and indices as a dotted name."""
    return ".".join(map(str, path)) or "observation"
