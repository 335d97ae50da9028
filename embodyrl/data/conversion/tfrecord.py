"""TFRecord files and the `tf.train.Example` messages in them, without TensorFlow.

A record is its length (8 bytes), a checksum of the length, the content and a checksum of the content. A checksum is a
masked CRC-32C. An Example maps names to lists of bytes, floats or integers in the protobuf wire format.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from embodyrl.errors import EmbodyError

Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_POLYNOMIAL = np.uint32(0x82F63B78)
"""Polynomial of CRC-32C (Castagnoli), with reversed bits."""
_LANES = 1024
_SHORT = 64
_Words = npt.NDArray[np.uint32]


def _build_byte_table() -> _Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), _POLYNOMIAL, np.uint32(0))
    return table


_TABLE = _build_byte_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if len(data) < _SHORT:
        state = 0xFFFFFFFF
        for byte in data:
            state = int(_TABLE[(state ^ byte) & 255]) ^ (state >> 8)
        return state ^ 0xFFFFFFFF
    # Inverting the first four bytes replaces the initial state; leading zero bytes do not change a state of zero.
    length = -(-len(data) // _LANES)
    lanes = np.zeros(_LANES * length, np.uint8)
    lanes[-len(data) :] = np.frombuffer(data, np.uint8)
    lanes[-len(data) :][:4] ^= np.uint8(255)
    states = np.zeros(_LANES, np.uint32)
    for column in np.ascontiguousarray(lanes.reshape(_LANES, length).T):
        states = _TABLE[(states ^ column) & np.uint32(255)] ^ (states >> np.uint32(8))
    shift = _get_shift_map(length)
    while len(states) > 1:
        states = _apply_map(shift, states[0::2]) ^ states[1::2]
        shift = _apply_map(shift, shift)
    return int(states[0]) ^ 0xFFFFFFFF


def _get_shift_map(count: int) -> _Words:
    """Return the linear map of a CRC state that appends `count` zero bytes, as the images of the 32 unit vectors."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power, result = _TABLE[bits & np.uint32(255)] ^ (bits >> np.uint32(8)), bits
    while count:
        if count & 1:
            result = _apply_map(power, result)
        power, count = _apply_map(power, power), count >> 1
    return result


def _apply_map(images: _Words, states: _Words) -> _Words:
    """Apply a linear map over GF(2) to states [n]; `images` contains the images of the 32 unit vectors."""
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= np.where(states >> np.uint32(bit) & np.uint32(1), images[bit], np.uint32(0))
    return result


def compute_masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of TFRecord files: the checksum rotated by 15 bits, plus an offset."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path, first: int = 0) -> Iterator[bytes]:
    """Yield the records of a file from number `first` on; earlier records are skipped without reading them.

    Raises:
        EmbodyError: the file is missing or truncated, or a checksum is wrong.
    """
    try:
        with path.open("rb") as file:
            size, number = path.stat().st_size, 0
            while file.tell() < size:
                length = _read_length(path, file, number)
                if file.tell() + length + 4 > size:
                    raise _build_damaged_error(path, f"record {number} is truncated")
                if number < first:
                    file.seek(length + 4, 1)
                else:
                    content, stored = file.read(length), file.read(4)
                    if struct.pack("<I", compute_masked_crc(content)) != stored:
                        raise _build_damaged_error(path, f"record {number} has a wrong checksum")
                    yield content
                number += 1
    except OSError as error:
        raise EmbodyError(f"{path} cannot be read: {error.strerror}. Download the data set again.") from error


def _read_length(path: Path, file: BinaryIO, number: int) -> int:
    head, stored = file.read(8), file.read(4)
    if len(stored) < 4:
        raise _build_damaged_error(path, f"record {number} is truncated")
    if struct.pack("<I", compute_masked_crc(head)) != stored:
        problem = f"record {number} has a wrong length checksum, or the file is compressed or not a TFRecord file"
        raise _build_damaged_error(path, problem)
    return struct.unpack("<Q", head)[0]


def _build_damaged_error(path: Path, problem: str) -> EmbodyError:
    return EmbodyError(f"{path}: {problem}. Download this file again.")


@functools.cache
def _get_example_class() -> Any:
    """Return the message class `tf.train.Example`; TensorFlow declares the same fields in example.proto."""
    file, kind = descriptor_pb2.FileDescriptorProto(name="example.proto"), descriptor_pb2.FieldDescriptorProto
    example, features, entry, feature = (
        file.message_type.add(name=name).field for name in ("Example", "Features", "Entry", "Feature")
    )
    example.add(name="features", number=1, label=kind.LABEL_OPTIONAL, type=kind.TYPE_MESSAGE, type_name=".Features")
    features.add(name="feature", number=1, label=kind.LABEL_REPEATED, type=kind.TYPE_MESSAGE, type_name=".Entry")
    entry.add(name="key", number=1, label=kind.LABEL_OPTIONAL, type=kind.TYPE_STRING)
    entry.add(name="value", number=2, label=kind.LABEL_OPTIONAL, type=kind.TYPE_MESSAGE, type_name=".Feature")
    for number, value_type in enumerate((kind.TYPE_BYTES, kind.TYPE_FLOAT, kind.TYPE_INT64), 1):
        name = f"list{number}"
        feature.add(
            name=name, number=number, label=kind.LABEL_OPTIONAL, type=kind.TYPE_MESSAGE, type_name=f".{name.title()}"
        )
        values = file.message_type.add(name=name.title()).field
        values.add(name="value", number=1, label=kind.LABEL_REPEATED, type=value_type)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def parse_example(content: bytes) -> dict[str, Feature]:
    """Return the features of a `tf.train.Example` by name.

    Raises:
        ValueError: the content is not a valid `tf.train.Example`.
    """
    try:
        entries = _get_example_class().FromString(content).features.feature
    except DecodeError as error:
        raise ValueError(str(error)) from error
    features: dict[str, Feature] = {}
    for name, feature in ((entry.key, entry.value) for entry in entries):
        if feature.HasField("list2"):
            features[name] = np.array(feature.list2.value, np.float32)
        elif feature.HasField("list3"):
            features[name] = np.array(feature.list3.value, np.int64)
        else:
            features[name] = list(feature.list1.value)
    return features
