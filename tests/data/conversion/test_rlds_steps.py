"""RLDS sources: the last step of an episode, and images without a declared size."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_convert import FEATURES, INFO, KEYS, RLDS, convert, edit, step_features

from embodyrl.data.conversion.tfrecord import compute_masked_crc, read_records
from embodyrl.data.reader import load_demonstrations

ALL = np.random.default_rng(0).normal(size=(12, 9)).astype(np.float32)[:, 6:]
"""Actions of the source: three episodes of 3, 5 and 4 steps."""


def copied(tmp_path: Path) -> Path:
    return shutil.copytree(RLDS / "1.0.0", tmp_path / "set" / "1.0.0")


def test_openvla_copies_of_libero_keep_the_last_action(tmp_path: Path, capsys: Any) -> None:
    root = copied(tmp_path)
    edit(root / INFO, lambda info: info.update(name="libero_toy_no_noops"))
    for path in root.glob("tiny_arm-*"):
        path.rename(root / path.name.replace("tiny_arm", "libero_toy_no_noops"))
    gripper = ["data.gripper=[-4,4]"]  # the actions are random numbers
    assert convert(root, tmp_path / "out", *gripper) == 0
    np.testing.assert_array_equal(load_demonstrations(tmp_path / "out").action, ALL)
    assert "left out" not in capsys.readouterr().out


def test_banner_reports_skipped_last_steps(tmp_path: Path, capsys: Any) -> None:
    assert convert(RLDS, tmp_path / "out", KEYS) == 0
    assert "left out steps marked as is_last, which have no action" in " ".join(capsys.readouterr().out.split())
    assert load_demonstrations(tmp_path / "out").reward[[1, 5, 8]].tolist() == [1, 1, 1], (
        "rewards move to the last action"
    )


def test_sources_without_is_last_keep_all_steps(tmp_path: Path) -> None:
    root = copied(tmp_path)
    edit(root / FEATURES, lambda features: step_features(features).pop("is_last"))
    assert convert(root, tmp_path / "out", KEYS) == 0
    np.testing.assert_array_equal(load_demonstrations(tmp_path / "out").action, ALL)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the records of a shard, and write new checksums."""
    records = [change(record) for record in read_records(path)]
    with path.open("wb") as file:
        for record in records:
            head = struct.pack("<Q", len(record))
            crc = [struct.pack("<I", compute_masked_crc(part)) for part in (head, record)]
            file.write(head + crc[0] + record + crc[1])


def test_rlds_record_with_is_last_before_its_end_is_rejected(tmp_path: Path, capsys: Any) -> None:
    def swap(record: bytes) -> bytes:
        place = record.index(bytes([0, 0, 1]), record.index(b"steps/is_last"))
        return record[:place] + bytes([0, 1, 0]) + record[place + 3 :]

    root = copied(tmp_path)
    rewrite(root / "tiny_arm-train.tfrecord-00000-of-00002", swap)
    assert convert(root, tmp_path / "out", KEYS) == 1
    assert "record 0: is_last marks step 1 of 3. Store one episode in each record." in capsys.readouterr().err


@pytest.mark.parametrize("filler", [np.nan, np.inf, 9.0, 0.0])
def test_placeholder_of_the_last_step_is_never_a_target(tmp_path: Path, filler: float) -> None:
    root, last = copied(tmp_path), iter((2, 7, 11))

    def fill(record: bytes) -> bytes:
        old = ALL[next(last)].tobytes()
        return record.replace(old, np.full(3, filler, np.float32).tobytes())

    for path in sorted(root.glob("tiny_arm-*")):
        rewrite(path, fill)
    assert convert(root, tmp_path / "out", KEYS) == 0
    np.testing.assert_array_equal(load_demonstrations(tmp_path / "out").action, np.delete(ALL, [2, 7, 11], axis=0))


UNKNOWN: list[Callable[[dict[str, Any]], Any]] = [
    lambda image: image["shape"].update(dimensions=["-1", "-1", "3"]),
    lambda image: image["shape"].update(dimensions=[None, None, 3]),
    lambda image: image["shape"].update(dimensions=["16", "-1", "3"]),
    lambda image: image.pop("shape"),
    lambda image: image.update(shape={}),
]


@pytest.mark.parametrize("change", UNKNOWN)
def test_images_without_a_declared_size_have_the_size_of_the_first(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    root = copied(tmp_path)
    edit(
        root / FEATURES, lambda f: change(step_features(f)["observation"]["featuresDict"]["features"]["image"]["image"])
    )
    assert convert(root, tmp_path / "out", KEYS) == 0
    assert load_demonstrations(tmp_path / "out").images[5, 0, 0, 0].tolist() == [50, 12 * 3 + 5, 80]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["action"]["tensor"]["shape"].update(dimensions=["-1"]), "its shape [-1] is not fixed"),
        (lambda s: s["action"]["tensor"].update(encoding="zlib"), "its encoding is zlib, expected none"),
        (lambda s: s.update(action={"pythonClassName": "Video"}), "its type is Video, expected a tensor"),
        (lambda s: s.update(action={"image": {"dtype": "uint16", "shape": {"dimensions": [1, 1, 1]}}}), "type uint16"),
    ],
)
def test_error_names_the_reason_of_an_unsupported_column(
    tmp_path: Path, capsys: Any, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    root = copied(tmp_path)
    edit(root / FEATURES, lambda features: change(step_features(features)))
    assert convert(root, tmp_path / "out", KEYS) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "action cannot be converted: " in said
    assert reason in said
