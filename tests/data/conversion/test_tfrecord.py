"""TFRecord files and `tf.train.Example` messages, with files written by TensorFlow Datasets (rlds_files/write.py)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from embodyrl.data.conversion.tfrecord import compute_masked_crc, crc32c, parse_example, read_records
from embodyrl.errors import EmbodyError

FILES = Path(__file__).parent / "rlds_files" / "tiny_arm" / "1.0.0"
SHARD = FILES / "tiny_arm-train.tfrecord-00000-of-00002"


def bytewise(data: bytes) -> int:
    """Compute CRC-32C bit by bit, from its definition."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_crc32c_matches_the_rfc_3720_values() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([255] * 32)) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("length", [0, 1, 3, 63, 64, 65, 1023, 1024, 1025, 5000])
def test_crc32c_matches_a_bytewise_reference(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == bytewise(data)


def test_features_written_by_tensorflow_are_parsed() -> None:
    one, two = map(parse_example, read_records(SHARD))
    numbers = np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32)
    np.testing.assert_array_equal(one["steps/action"], numbers[:, 6:].ravel())
    np.testing.assert_array_equal(one["steps/observation/joints"], numbers[:, 4:6].ravel())
    np.testing.assert_array_equal(two["steps/is_last"], [0, 0, 0, 0, 1])
    assert two["steps/language_instruction"] == [b"open the door"] * 5
    assert two["episode_metadata/file_path"] == [b"demo_1.hdf5"]


def test_reading_starts_at_the_given_record() -> None:
    every = list(read_records(SHARD))
    assert list(read_records(SHARD, 1)) == every[1:]
    assert list(read_records(SHARD, 2)) == []


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def message(*fields: tuple[int, bytes]) -> bytes:
    return b"".join(bytes([number << 3 | 2]) + varint(len(content)) + content for number, content in fields)


def example(name: str, kind: int, values: bytes) -> bytes:
    feature = message((kind, values))
    return message((1, message((1, message((1, name.encode()), (2, feature))))))


@pytest.mark.parametrize("packed", [True, False])
def test_tfrecord_integers_of_all_sizes_are_parsed(packed: bool) -> None:
    values = [0, 1, 127, 128, 300, 2**31, -1, 2**63 - 1, -(2**63)]
    body = message((1, b"".join(map(varint, values)))) if packed else b"".join(b"\x08" + varint(v) for v in values)
    assert parse_example(example("n", 3, body))["n"].tolist() == values  # type: ignore[union-attr]


@pytest.mark.parametrize("packed", [True, False])
def test_tfrecord_floats_are_parsed(packed: bool) -> None:
    parts = [struct.pack("<f", value) for value in (0.5, -2.0, 1e30)]
    body = message((1, b"".join(parts))) if packed else b"".join(b"\x0d" + part for part in parts)
    np.testing.assert_array_equal(parse_example(example("n", 2, body))["n"], np.float32([0.5, -2.0, 1e30]))


def test_damaged_example_messages_raise_only_value_errors() -> None:
    content = next(iter(read_records(SHARD)))
    rng, refused = np.random.default_rng(0), 0
    for place in rng.integers(0, len(content), 300).tolist():
        for damaged in (content[:place], content[:place] + bytes([int(rng.integers(256))]) + content[place + 1 :]):
            try:
                parse_example(damaged)
            except ValueError:
                refused += 1
    assert 250 < refused < 600


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda raw: raw[:-3], "record 1 is truncated"),
        (lambda raw: raw[:5], "record 0 is truncated"),
        (lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:], "record 0 has a wrong checksum"),
        (lambda raw: bytes([raw[0] ^ 1]) + raw[1:], "record 0 has a wrong length checksum"),
        (
            lambda raw: raw + struct.pack("<QI", 2**60, compute_masked_crc(struct.pack("<Q", 2**60))),
            "record 2 is truncated",
        ),
    ],
)
def test_damaged_tfrecord_file_is_rejected(tmp_path: Path, change, error: str) -> None:
    path = tmp_path / "shard"
    path.write_bytes(change(SHARD.read_bytes()))
    with pytest.raises(EmbodyError, match=error):
        list(read_records(path))
