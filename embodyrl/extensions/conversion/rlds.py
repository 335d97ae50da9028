"""Source of demonstrations: RLDS data sets in TFRecord files, in the layout of TensorFlow Datasets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import ConfigError, EmbodyError, reason_of
from embodyrl.extensions.conversion.settings import ConversionSettings
from embodyrl.extensions.conversion.source import (
    Column,
    Conventions,
    Description,
    Kind,
    RawEpisode,
    libero_keys,
    plain_shape,
)
from embodyrl.extensions.conversion.tfrecord import Feature, parse_example, read_records
from embodyrl.extensions.demonstrations.frames import decode_png
from embodyrl.files import read_json

INFO, FEATURES = "dataset_info.json", "features.json"
_STEPS = "steps"
_INSTRUCTION = "language_instruction"
_LIBERO = libero_keys(
    "observation/image",
    "observation/wrist_image",
    ["observation/state"],
    "action",
    reward="reward",
    task=_INSTRUCTION,
)
_LIBERO_NAME = re.compile("liber_?o")
"""Prefix of LIBERO data sets; TensorFlow Datasets converts the class name LIBERO_10 to liber_o10."""
_COMMON = {"action": "action", "observation/state": "observation.state", "reward": "next.reward", _INSTRUCTION: "task"}
_LEAVES = {"image": Kind.image, "tensor": Kind.numbers, "text": Kind.text}


def find_rlds(source: Path) -> Path | None:
    """Return the folder with the RLDS metadata: `source` or the folder of its only version; None without metadata."""
    folders = [path.parent for path in (source / FEATURES, *sorted(source.glob(f"*/{FEATURES}"))) if path.is_file()]
    if len(folders) > 1 and folders[0] != source:
        names = ", ".join(folder.name for folder in folders)
        raise ConfigError(f"{source} contains several versions ({names}). Pass one of these folders.")
    return folders[0] if folders else None


class RldsSource:
    """Episodes of one split of an RLDS data set."""

    def __init__(self, folder: Path, data: ConversionSettings) -> None:
        """Read the metadata of the data set.

        Raises:
            EmbodyError: a file of metadata is missing or damaged.
            ConfigError: the split does not exist, or the file format is not supported.
        """
        info, features = (_read_json(folder / name) for name in (INFO, FEATURES))
        try:
            self._columns = dict(_columns(features["featuresDict"]["features"][_STEPS]["sequence"]["feature"], ""))
            split = _find_split(folder, info, data.split)
            self._lengths = [int(length) for length in split["shardLengths"]]
            self._shards = [folder / name for name in _shard_names(info, split, len(self._lengths))]
            name = str(info["name"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EmbodyError(
                f"{folder}: {INFO} or {FEATURES} does not describe an RLDS data set ({reason_of(error)}). "
                "Download both files again."
            ) from error
        if missing := [path for path in self._shards if not path.is_file()]:
            raise EmbodyError(f"{missing[0]} is missing. Download the data set again.")
        is_libero = _LIBERO_NAME.match(name) is not None and _LIBERO.keys() <= self._columns.keys()
        self._description = Description(
            kind="RLDS",
            name=name,
            episodes=sum(self._lengths),
            columns=self._columns,
            # OpenVLA's copies of LIBERO contain upright frames; the gripper is robosuite's.
            conventions=Conventions(keys=_LIBERO, gripper=(-1, 1)) if is_libero else Conventions(keys=_COMMON),
        )

    @property
    def description(self) -> Description:
        """Name, size, columns and conventions of the data set."""
        return self._description

    def episodes(self, first: int, columns: Sequence[str]) -> Iterator[RawEpisode]:
        """Yield the episodes from number `first` on (see `Source.episodes`)."""
        number = 0
        for path, length in zip(self._shards, self._lengths, strict=True):
            if number + length <= first:
                number += length
                continue
            skip, count = max(0, first - number), max(0, first - number)
            for content in read_records(path, skip):
                yield self._episode(number + count, f"{path}, record {count}", content, columns)
                count += 1
            if count != length:
                raise EmbodyError(
                    f"{path} has {count} records, but {INFO} declares {length}. Download this file again."
                )
            number += length

    def _episode(self, number: int, where: str, content: bytes, columns: Sequence[str]) -> RawEpisode:
        try:
            features = parse_example(content)
        except ValueError as error:
            raise EmbodyError(f"{where} is not a tf.train.Example ({error}). Download this file again.") from error
        arrays: dict[str, np.ndarray] = {}
        texts: dict[str, list[str]] = {}
        for name in columns:
            stored, column = features.get(f"{_STEPS}/{name}"), self._columns[name]
            try:
                if stored is None:
                    raise ValueError("the record does not contain the feature")
                if column.kind is Kind.text:
                    texts[name] = [value.decode("utf-8") for value in _as_bytes(stored)]
                else:
                    arrays[name] = _images(stored, column) if column.kind is Kind.image else _numbers(stored, column)
            except (ValueError, EmbodyError) as error:
                cause = str(error).partition(". ")[0]
                raise EmbodyError(f"{where}: {_STEPS}/{name}: {cause}. Download this file again.") from error
        return RawEpisode(number=number, where=where, columns=arrays, texts=texts)


def _as_bytes(stored: Feature) -> list[bytes]:
    if not isinstance(stored, list):
        raise ValueError("the feature contains numbers instead of bytes")
    return stored


def _images(stored: Feature, column: Column) -> np.ndarray:
    encoded = _as_bytes(stored)
    images = np.empty((len(encoded), *column.shape[:2], 3), np.uint8)
    for content, out in zip(encoded, images, strict=True):
        decode_png(content, out)
    return images


def _numbers(stored: Feature, column: Column) -> np.ndarray:
    if isinstance(stored, list):
        raise ValueError("the feature contains bytes instead of numbers")
    size = math.prod(column.shape)
    if len(stored) % size:
        raise ValueError(f"the feature contains {len(stored)} numbers, expected a multiple of {size}")
    # A tensor of integers may be an image that was stored without compression.
    return stored.reshape(-1, *column.shape)


def _columns(feature: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Column]]:
    """Yield the path and the description of each column of a step; columns of unknown size are skipped."""
    if "featuresDict" in feature:
        for name, part in feature["featuresDict"]["features"].items():
            yield from _columns(part, f"{prefix}/{name}" if prefix else name)
        return
    for name, kind in _LEAVES.items():
        if name in feature:
            leaf = feature[name]
            shape = plain_shape((leaf.get("shape") or {}).get("dimensions", ()))
            known = all(size > 0 for size in shape) and leaf.get("encoding", "none") == "none"
            if name == "tensor" and leaf.get("dtype") in ("string", "object"):
                kind = Kind.text
            if known and not (kind is Kind.image and (len(shape) != 3 or leaf.get("dtype", "uint8") != "uint8")):
                yield prefix, Column(kind, shape)


def _find_split(folder: Path, info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = {split["name"]: split for split in info["splits"]}
    if name not in found:
        raise ConfigError(f"{folder} has no split '{name}' (data.split). Splits: {', '.join(found)}.")
    kind = info.get("fileFormat", "tfrecord")
    if kind != "tfrecord":
        raise ConfigError(
            f"{folder} has files of the format {kind}, expected tfrecord. Convert them: "
            "tfds convert_format --out_file_format=tfrecord."
        )
    return found[name]


def _shard_names(info: Mapping[str, Any], split: Mapping[str, Any], count: int) -> Iterator[str]:
    template = split.get("filepathTemplate") or "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    for shard in range(count):
        values = {"DATASET": info["name"], "SPLIT": split["name"], "FILEFORMAT": "tfrecord"}
        values |= {"SHARD_X_OF_Y": f"{shard:05d}-of-{count:05d}", "SHARD_INDEX": f"{shard:05d}"}
        values |= {"NUM_SHARDS": f"{count:05d}"}
        name = re.sub(r"\{(\w+)\}", lambda found, values=values: values[found[1]], template)
        if Path(name).name != name:
            raise ConfigError(
                f"{INFO}: the path {template!r} refers to files outside the data set. Do not use this data set."
            )
        yield name


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise EmbodyError(f"{path} is missing. Download the data set again.") from None
    except (OSError, ValueError) as error:
        raise EmbodyError(f"{path} cannot be read: {error}. Download the data set again.") from error
