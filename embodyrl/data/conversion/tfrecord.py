"""TFRecord files and the `tf.train.Example` messages in them, without TensorFlow.

A record is its length (8 bytes), a checksum of the length, the content and a checksum of the content. A checksum is a
masked CRC-32C. An Example maps names to lists of bytes, floats or integers in the protobuf wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

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


def parse_example(content: bytes) -> dict[str, Feature]:
    """Return the features of a `tf.train.Example` by name.

    Raises:
        ValueError: the content is not a valid `tf.train.Example`.
    """
    features_by_name: dict[str, Feature] = {}
    for number, features in _iterate_fields(memoryview(content)):
        for _, entry in _iterate_fields(features) if number == 1 else ():
            parts = dict(_iterate_fields(entry))
            if 1 in parts and 2 in parts:
                features_by_name[bytes(parts[1]).decode("utf-8")] = _parse_feature(parts[2])
    return features_by_name


def _parse_feature(message: memoryview) -> Feature:
    for kind, content in _iterate_fields(message):
        values = [value for number, value in _iterate_fields(content) if number == 1]
        if kind == 1:
            return [bytes(value) for value in values]
        joined = b"".join(values)
        if kind == 2:
            return np.frombuffer(joined, "<f4")
        if kind == 3:
            return _parse_integers(joined)
    return []


def _parse_integers(content: bytes) -> npt.NDArray[np.int64]:
    """Decode a sequence of varints: seven bits per byte, the lowest first; the high bit of the last byte is 0."""
    raw = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(raw < 128)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise ValueError("an integer (varint) is truncated")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    values = np.zeros(len(ends), np.uint64)
    lengths = ends - starts + 1
    for index in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > index)
        values[rows] |= (raw[starts[rows] + index] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * index)
    return values.view(np.int64)


def _iterate_fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the raw content of each field of a protobuf message."""
    offset = 0
    while offset < len(message):
        tag, offset = _parse_varint(message, offset)
        kind, start = tag & 7, offset
        if kind == 0:
            _, offset = _parse_varint(message, offset)
        elif kind == 2:
            length, start = _parse_varint(message, offset)
            offset = start + length
        elif kind in (1, 5):
            offset += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        if offset > len(message):
            raise ValueError("the message is truncated")
        yield tag >> 3, message[start:offset]


def _parse_varint(message: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(message) and shift < 70:
        byte = message[offset]
        value, offset, shift = value | (byte & 127) << shift, offset + 1, shift + 7
        if byte < 128:
            return value, offset
    raise ValueError("an integer (varint) is truncated")
