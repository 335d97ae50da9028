"""Messages as msgpack with arrays, as openpi-client and vla-eval write them; nothing that is read can run code."""

import io
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from embodyrl.errors import EmbodyError, MissingDependencyError

_KINDS = "biuf"
"""Booleans and numbers; objects would be pickled, and nothing here needs text."""
_MOST_PIXELS = 1 << 26


class MessageError(EmbodyError, ValueError):
    """A message is malformed, or says something else than was asked for."""


def need(package: str) -> Any:
    """Import a package of the extra `serve`, or a module of one.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        raise MissingDependencyError(
            f"{name} is not installed; policies are served and asked with it. Fix: pip install 'embodyrl[serve]'."
        ) from error


def bytes_keyed(array: np.ndarray) -> dict[Any, Any]:
    """An array as openpi writes it: keys are bytes."""
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def text_keyed(array: np.ndarray) -> dict[Any, Any]:
    """An array as vla-eval writes it (its images may also be PNG or JPEG): keys are text."""
    return {"__ndarray__": True, "data": array.tobytes(), "dtype": array.dtype.str, "shape": list(array.shape)}


def pack(message: object, write_array: Callable[[np.ndarray], dict[Any, Any]]) -> bytes:
    """Encode a message of mappings, lists, numbers, texts and arrays."""

    def default(value: object) -> object:
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return write_array(value)
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return value.item()
        raise MessageError(f"a {type(value).__name__} cannot be sent.")

    return need("msgpack").packb(message, default=default)


def unpack(data: bytes | str) -> Any:
    """Decode a message of either protocol.

    Raises:
        MessageError: it is no msgpack, or holds an array of another kind or size than it says.
    """
    msgpack = need("msgpack")
    if isinstance(data, str):
        raise MessageError(f"wanted bytes and got the text {data[:2000]!r}.")
    try:
        return msgpack.unpackb(data, object_hook=_read_arrays, raw=False)
    except MessageError:
        raise
    except Exception as error:  # msgpack has a dozen kinds, some of which are bare ValueErrors and stack overflows
        raise MessageError(f"{len(data)} bytes that are no msgpack: {error}.") from error


def _read_arrays(found: dict[Any, Any]) -> Any:
    if "__image__" in found and found.get("format") != "raw":
        return _picture(found)
    if "__image__" in found or "__ndarray__" in found or b"__ndarray__" in found:
        return _array(found)
    if b"__npgeneric__" not in found:
        return found
    value = _field(found, "data")
    if not isinstance(value, int | float):
        raise MessageError(f"a number that is {type(value).__name__}.")
    return value


def _array(found: Mapping[Any, Any]) -> np.ndarray:
    try:
        dtype, shape = np.dtype(_field(found, "dtype")), tuple(map(int, _field(found, "shape")))
    except (TypeError, ValueError) as error:
        raise MessageError(f"an array of no known type or shape: {error}.") from error
    data = _field(found, "data")
    if dtype.kind not in _KINDS:
        raise MessageError(f"an array of {dtype}; only booleans, integers and floats are read.")
    # Before the array is made: a lie about its size must not become memory that is read or reserved.
    if not isinstance(data, bytes) or min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise MessageError(f"an array of shape {shape} and type {dtype} whose data do not have that size.")
    return np.frombuffer(data, dtype).reshape(shape)


def _picture(found: Mapping[Any, Any]) -> np.ndarray:
    """PNG or JPEG; its size is looked at before it is decoded."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(_field(found, "data")), formats=("PNG", "JPEG")) as image:
            if math.prod(image.size) > _MOST_PIXELS:
                raise MessageError(f"an image of {image.size} pixels.")
            return np.asarray(image)
    except (OSError, TypeError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MessageError(f"an image that is neither PNG nor JPEG: {error}.") from error


def _field(found: Mapping[Any, Any], name: str) -> Any:
    key = name if name in found else name.encode()
    if key not in found:
        raise MessageError(f"an array without '{name}'.")
    return found[key]
