"""Wire formats of the openpi and vla-eval protocols: keys of observation fields, encoding and decoding."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from embodyrl.errors import EmbodyError, MissingDependencyError
from embodyrl.policies.remote.settings import WireFormatSettings
from embodyrl.types import ByteArray, FloatArray

_KINDS = "biuf"
"""Accepted kinds of numpy dtypes: booleans and numbers. Object arrays would be pickled; text arrays are not needed."""
_MAX_PIXELS = 1 << 26
"""Maximum number of pixel values (pixels times channels) of all images of a message."""
_MAX_PARTS = 1 << 16
"""Maximum number of entries of all lists and mappings of a message; an array counts as one entry."""
_MAX_LIST_LENGTH, _MAX_TEXT_LENGTH, _MAX_DIMENSIONS = 1 << 14, 1 << 16, 32


class MessageError(EmbodyError, ValueError):
    """Malformed message, or message with unexpected content."""


def import_optional(package: str) -> Any:
    """Import a package that the extra `serve` installs, or a module of the package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise MissingDependencyError.from_import_error(package, error, "pip install 'embodyrl[serve]'.") from error


def encode_openpi_array(array: np.ndarray) -> dict[Any, Any]:
    """Encode an array as in openpi, as a mapping with bytes as keys."""
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def encode_vla_eval_array(array: np.ndarray) -> dict[Any, Any]:
    """Encode an array as in vla-eval, as a mapping with strings as keys."""
    return {"__ndarray__": True, "data": array.tobytes(), "dtype": array.dtype.str, "shape": list(array.shape)}


def pack(message: object, write_array: Callable[[np.ndarray], dict[Any, Any]]) -> bytes:
    """Encode a message of mappings, lists, numbers, strings and arrays."""

    def default(value: object) -> object:
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return write_array(value)
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return value.item()
        raise MessageError(
            f"Values of type {type(value).__name__} cannot be sent; use numbers, strings, arrays, lists or mappings."
        )

    return import_optional("msgpack").packb(message, default=default)


def unpack(data: bytes | str) -> Any:
    """Decode a message of either protocol.

    Raises:
        MessageError: the data are not msgpack, have too many or too large parts, or an array has another size.
    """
    msgpack = import_optional("msgpack")
    if isinstance(data, str):
        raise MessageError(f"A message must be bytes, but this message is the string {data[:2000]!r}.")
    read = _Reader()
    limits = {"max_array_len": _MAX_LIST_LENGTH, "max_map_len": _MAX_LIST_LENGTH, "max_str_len": _MAX_TEXT_LENGTH}
    try:
        return msgpack.unpackb(data, object_hook=read.mapping, list_hook=read.list, raw=False, max_ext_len=16, **limits)
    except MessageError:
        raise
    except Exception as error:  # msgpack raises a dozen types, including ValueError and stack overflows
        raise MessageError(f"A message of {len(data)} bytes is not msgpack ({error}). Check the protocol.") from error


class _Reader:
    """Decoder that limits a message's entries and pixels, because one byte can become an object of 100 bytes."""

    def __init__(self) -> None:
        self._parts = self._pixels = 0

    def list(self, content: list[Any]) -> list[Any]:
        """Count the entries of a decoded list towards the limit of a message, and return the list."""
        self._count(content)
        return content

    def mapping(self, content: dict[Any, Any]) -> Any:
        """Count the entries of a decoded mapping; return the mapping, or the image, array or number that it encodes."""
        self._count(content)
        if "__image__" in content and content.get("format") != "raw":
            return self._decode_image(content)
        if "__image__" in content or "__ndarray__" in content or b"__ndarray__" in content:
            return _decode_array(content)
        if b"__npgeneric__" not in content:
            return content
        value = _get_field(content, "data")
        if not isinstance(value, int | float):
            raise MessageError(f"Values of type {type(value).__name__} are not supported in messages.")
        return value

    def _count(self, content: Sized) -> None:
        self._parts += 1 + len(content)
        if self._parts > _MAX_PARTS:
            raise MessageError(
                f"The message has more than {_MAX_PARTS} list and mapping entries; encode numeric data as arrays."
            )

    def _decode_image(self, content: Mapping[Any, Any]) -> np.ndarray:
        """Decode a PNG or JPEG image after checking its size."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(_get_field(content, "data")), formats=("PNG", "JPEG")) as image:
                self._pixels += math.prod(image.size) * len(image.getbands())
                if self._pixels > _MAX_PIXELS:
                    raise MessageError(
                        f"The images of a message have more than {_MAX_PIXELS} pixels in all channels; the size of the "
                        f"last image is {image.size}. Send smaller images."
                    )
                return np.asarray(image)
        except (OSError, TypeError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise MessageError(f"An image is neither PNG nor JPEG: {error}.") from error


def _decode_array(content: Mapping[Any, Any]) -> np.ndarray:
    shape, data = _get_field(content, "shape"), _get_field(content, "data")
    # Checked before the product of the sizes is computed, which could have millions of digits.
    is_shape = isinstance(shape, list | tuple) and len(shape) <= _MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and abs(size) < 1 << 32 for size in shape):
        raise MessageError(f"An array has an unknown shape: {shape!r:.80}.")
    try:
        dtype = np.dtype(_get_field(content, "dtype"))
    except (TypeError, ValueError) as error:
        raise MessageError(f"An array has an unknown type: {error}.") from error
    if dtype.kind not in _KINDS:
        raise MessageError(f"An array has type {dtype}; only booleans, integers and floats are supported.")
    # Checked before the array is created, so that wrong sizes cause neither reads nor allocations.
    if not isinstance(data, bytes) or min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise MessageError(f"An array of shape {shape} and type {dtype} has data of the wrong size.")
    return np.frombuffer(data, dtype).reshape(shape)


def _get_field(content: Mapping[Any, Any], name: str) -> Any:
    key = name if name in content else name.encode()
    if key not in content:
        raise MessageError(f"An encoded array of the message has no '{name}'. Check the protocol of the sender.")
    return content[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObservation:
    """Observation in a message. Its images are upright, regardless of the simulator's image orientation."""

    images: tuple[ByteArray, ...]
    """Images, each [H, W, 3] uint8."""
    state: FloatArray | None
    """State [S]; None: not sent."""
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Keys of an observation's fields in messages."""

    images: tuple[str, ...]
    state: tuple[str, ...]
    """Keys of the state; `write` uses the first key, `read` accepts every key."""
    prompt: tuple[str, ...]
    """Keys of the instruction; `write` uses the first key, `read` accepts every key."""
    group: str = ""
    """Key of the mapping of images; empty: the observation itself."""
    by_position: bool = False
    """True if images are read by position instead of by name."""

    def write(self, observation: RemoteObservation) -> dict[str, Any]:
        """Encode the observation as a message; cameras without a name are dropped."""
        image_fields: dict[str, Any] = dict(zip(self.images, observation.images, strict=False))
        # Without a group, `image_fields` becomes the message, to which the other fields are added.
        message = {self.group: image_fields} if self.group else image_fields
        message |= {self.prompt[0]: observation.prompt}
        return message if observation.state is None else message | {self.state[0]: observation.state}

    def read(self, message: object, *, images: int, states: int) -> RemoteObservation:
        """Return the observation that a message contains.

        Args:
            message: the received message.
            images: number of required images.
            states: length of the required state; 0: none.

        Raises:
            MessageError: a field is missing or has another shape; the message lists the received fields.
        """
        if not isinstance(message, Mapping):
            raise MessageError(f"The observation is a {type(message).__name__}, expected a mapping.")
        prompt = _get_first(message, self.prompt)
        if not isinstance(prompt, str):
            raise MessageError(f"'{self.prompt[0]}' must be a string. {_list_received_fields(message)}")
        state = None
        if states:
            state = np.asarray(_get_first(message, self.state), np.float32)
            if state.shape != (states,) or not np.isfinite(state).all():
                raise MessageError(
                    f"'{self.state[0]}' must have {states} finite numbers, but has shape {state.shape}. "
                    f"{_list_received_fields(message)}"
                )
        return RemoteObservation(images=self._get_images(message, images), state=state, prompt=prompt)

    def _get_images(self, message: Mapping[Any, Any], count: int) -> tuple[ByteArray, ...]:
        image_fields = message.get(self.group) if self.group else message
        if not isinstance(image_fields, Mapping):
            raise MessageError(f"'{self.group}' must be a mapping of images. {_list_received_fields(message)}")
        names: Sequence[Any] = list(image_fields) if self.by_position else self.images
        if len(names) < count or any(name not in image_fields for name in names[:count]):
            missing = f"{count} image{'s' * (count > 1)}" if self.by_position else ", ".join(map(repr, names[:count]))
            raise MessageError(
                f"The observation lacks {missing}. {_list_received_fields(image_fields)} "
                "Fix: list the keys in image_names."
            )
        images = tuple(np.asarray(image_fields[name]) for name in names[:count])
        for name, image in zip(names, images, strict=False):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3 or 0 in image.shape:
                raise MessageError(
                    f"Image '{name}' has type {image.dtype} and shape {list(image.shape)}, "
                    "expected uint8 [height, width, 3]."
                )
        if len({image.shape for image in images}) > 1:
            shapes = ", ".join(str(list(image.shape)) for image in images)
            raise MessageError(f"The images differ in size: {shapes}. Send images of the same size.")
        return images


OPENPI = FieldNames(
    images=("observation/image", "observation/wrist_image"), state=("observation/state",), prompt=("prompt",)
)
"""Field names of openpi's LIBERO policies."""
VLA_EVAL = FieldNames(
    images=("agentview", "wrist"),
    state=("states", "state"),
    prompt=("task_description",),
    group="images",
    by_position=True,
)
"""Field names of vla-eval's LIBERO benchmark. The servers of vla-eval read images by position."""


def get_field_names(cfg: WireFormatSettings) -> FieldNames:
    """Return the keys of message fields: the config's keys if set, else the protocol's keys."""
    names = {"openpi": OPENPI, "vla_eval": VLA_EVAL}[cfg.protocol]
    return FieldNames(
        images=names.images if cfg.image_names is None else tuple(cfg.image_names),
        state=names.state if cfg.state_name is None else (cfg.state_name,),
        prompt=names.prompt if cfg.prompt_name is None else (cfg.prompt_name,),
        group=names.group,
        by_position=names.by_position and cfg.image_names is None,
    )


def _get_first(message: Mapping[Any, Any], names: Sequence[str]) -> Any:
    return next((message[name] for name in names if name in message), None)


def _list_received_fields(message: Mapping[Any, Any]) -> str:
    return f"Received: {', '.join(sorted(map(repr, message))) or 'nothing'}."
