"""Source of demonstrations: RLDS data sets in TFRecord files, in the layout of TensorFlow Datasets."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.conversion.settings import ConversionSettings
from embodyrl.data.conversion.source import Column, Conventions, Description, Kind, RawEpisode
from embodyrl.data.conversion.tfrecord import Feature, parse_example, read_records
from embodyrl.data.frames import decode_png
from embodyrl.data.tables import convert_read_errors, find_file
from embodyrl.errors import ConfigError, EmbodyError, format_reason
from embodyrl.files import read_json
from embodyrl.text.images import LazyImage

INFO, FEATURES = "dataset_info.json", "features.json"
_STEPS = "steps"
_INSTRUCTION, _LAST = "language_instruction", "is_last"
_COMMON = {"action": "action", "observation/state": "observation.state", "reward": "next.reward", _INSTRUCTION: "task"}
_LIBERO = {
    "observation/image": "observation.images.agentview",
    "observation/wrist_image": "observation.images.robot0_eye_in_hand",
    "observation/state": "observation.state",
    "action": "action",
    "reward": "next.reward",
    _INSTRUCTION: "task",
}
_LIBERO_NAME = re.compile("liber_?o")
"""Prefix of LIBERO data sets; TensorFlow Datasets converts the class name LIBERO_10 to liber_o10."""
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
        info, features = (_read_json(find_file(folder, name)) for name in (INFO, FEATURES))
        try:
            step = features["featuresDict"]["features"][_STEPS]["sequence"]["feature"]
            columns = dict(_list_columns(step, ""))
            split = _find_split(folder, info, data.split)
            self._lengths = [int(length) for length in split["shardLengths"]]
            self._shards = [find_file(folder, name) for name in _list_shard_names(info, split, len(self._lengths))]
            name = str(info["name"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EmbodyError(
                f"{folder}: {INFO} or {FEATURES} does not describe an RLDS data set ({format_reason(error)}). "
                "Download both files again."
            ) from error
        if missing := [path for path in self._shards if not path.is_file()]:
            raise EmbodyError(f"{missing[0]} is missing. Download the data set again.")
        self._columns = {name: column for name, column in columns.items() if isinstance(column, Column)}
        self._measure_images()
        is_libero = _LIBERO_NAME.match(name) is not None and _LIBERO.keys() <= self._columns.keys()
        # By the format's rules, the last step has no action; OpenVLA's copies of LIBERO store an action there.
        self._drops_last = not is_libero and _LAST in self._columns
        self.description = Description(
            kind="RLDS",
            name=name,
            episodes=sum(self._lengths),
            columns=self._columns,
            # OpenVLA's copies of LIBERO contain upright frames; the gripper is robosuite's.
            conventions=Conventions(keys=_LIBERO, gripper=(-1, 1)) if is_libero else Conventions(keys=_COMMON),
            left_out="steps marked as is_last, which have no action" if self._drops_last else "",
            unsupported={name: reason for name, reason in columns.items() if isinstance(reason, str)},
        )

    def _measure_images(self) -> None:
        """Set the size of image columns without a declared size to the size of the first image."""
        unknown = [name for name, column in self._columns.items() if column.kind is Kind.image and 0 in column.shape]
        if not unknown:
            return
        with_records = (shard for shard, length in zip(self._shards, self._lengths, strict=True) if length)
        path = next(with_records, self._shards[0])
        for content in itertools.islice(read_records(path), 1):
            features = _parse(f"{path}, record 0", content)
            for name in unknown:
                stored = features.get(f"{_STEPS}/{name}")
                if isinstance(stored, list) and stored:
                    size = LazyImage(stored[0], f"{path}, record 0, {_STEPS}/{name}").size
                    self._columns[name] = Column(Kind.image, (*size, 3))

    def episodes(self, first: int, columns: Sequence[str]) -> Iterator[RawEpisode]:
        """Yield the episodes from number `first` on (see `Source.episodes`)."""
        number = 0
        for path, length in zip(self._shards, self._lengths, strict=True):
            if number + length <= first:
                number += length
                continue
            skip, count = max(0, first - number), max(0, first - number)
            for content in read_records(path, skip):
                yield self._parse_episode(number + count, f"{path}, record {count}", content, columns)
                count += 1
            if count != length:
                raise EmbodyError(
                    f"{path} has {count} records, but {INFO} declares {length}. Download this file again."
                )
            number += length

    def _parse_episode(self, number: int, where: str, content: bytes, columns: Sequence[str]) -> RawEpisode:
        features = _parse(where, content)
        arrays: dict[str, np.ndarray] = {}
        texts: dict[str, list[str]] = {}
        for name in columns:
            stored, column = features.get(f"{_STEPS}/{name}"), self._columns[name]
            try:
                if stored is None:
                    raise ValueError("the record does not contain the feature")
                if column.kind is Kind.text:
                    texts[name] = [value.decode("utf-8") for value in _require_bytes(stored)]
                else:
                    arrays[name] = (
                        _decode_images(stored, column) if column.kind is Kind.image else _decode_numbers(stored, column)
                    )
            except (ValueError, EmbodyError) as error:
                cause = str(error).partition(". ")[0]
                fix = ", or write images of one size" if column.kind is Kind.image else ""
                raise EmbodyError(f"{where}: {_STEPS}/{name}: {cause}. Download this file again{fix}.") from error
        last = np.asarray(features.get(f"{_STEPS}/{_LAST}", ())).astype(np.bool_) if self._drops_last else np.zeros(0)
        if last[:-1].any():
            raise EmbodyError(
                f"{where}: {_LAST} marks step {last.argmax()} of {len(last)}. Store one episode in each record."
            )
        last_has_action = not last[-1:].any()
        return RawEpisode(number=number, where=where, columns=arrays, texts=texts, last_has_action=last_has_action)


def _parse(where: str, content: bytes) -> dict[str, Feature]:
    try:
        return parse_example(content)
    except ValueError as error:
        raise EmbodyError(f"{where} is not a tf.train.Example ({error}). Download this file again.") from error


def _require_bytes(stored: Feature) -> list[bytes]:
    if not isinstance(stored, list):
        raise ValueError("the feature contains numbers instead of bytes")
    return stored


def _decode_images(stored: Feature, column: Column) -> np.ndarray:
    encoded = _require_bytes(stored)
    images = np.empty((len(encoded), *column.shape[:2], 3), np.uint8)
    for content, out in zip(encoded, images, strict=True):
        decode_png(content, out)
    return images


def _decode_numbers(stored: Feature, column: Column) -> np.ndarray:
    if isinstance(stored, list):
        raise ValueError("the feature contains bytes instead of numbers")
    size = math.prod(column.shape)
    if len(stored) % size:
        raise ValueError(f"the feature contains {len(stored)} numbers, expected a multiple of {size}")
    return stored.reshape(-1, *column.shape)


def _list_columns(feature: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Column | str]]:
    """Yield the path and the description of each column of a step, or the reason why the column is not supported.

    Images without a declared size have height and width 0.
    """
    if "featuresDict" in feature:
        for name, part in feature["featuresDict"]["features"].items():
            yield from _list_columns(part, f"{prefix}/{name}" if prefix else name)
        return
    name = next((name for name in _LEAVES if name in feature), None)
    if name is None:
        yield prefix, f"its type is {feature.get('pythonClassName', 'unknown')}, expected a tensor, an image or a text"
        return
    leaf, kind = feature[name], _LEAVES[name]
    sizes = (leaf.get("shape") or {}).get("dimensions", ())
    shape, dtype = tuple(-1 if size is None else int(size) for size in sizes), leaf.get("dtype")
    if name == "tensor" and dtype in ("string", "object"):
        kind = Kind.text
    if kind is Kind.image and any(size < 1 for size in shape[:2] or (0,)):
        shape = (0, 0, 3)
    if leaf.get("encoding", "none") != "none":
        yield prefix, f"its encoding is {leaf['encoding']}, expected none"
    elif kind is Kind.image and (len(shape) != 3 or (dtype or "uint8") != "uint8"):
        yield prefix, f"its images have the type {dtype} and the shape {list(shape)}, expected uint8 and 3 dimensions"
    elif kind is not Kind.image and any(size < 1 for size in shape):
        yield prefix, f"its shape {list(shape)} is not fixed"
    else:
        yield prefix, Column(kind, shape)


def _find_split(folder: Path, info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    splits = {split["name"]: split for split in info["splits"]}
    if name not in splits:
        raise ConfigError(f"{folder} has no split '{name}' (data.split). Splits: {', '.join(splits)}.")
    kind = info.get("fileFormat", "tfrecord")
    if kind != "tfrecord":
        raise ConfigError(
            f"{folder} has files of the format {kind}, expected tfrecord. Convert them: "
            "tfds convert_format --out_file_format=tfrecord."
        )
    return splits[name]


def _list_shard_names(info: Mapping[str, Any], split: Mapping[str, Any], count: int) -> Iterator[str]:
    template = split.get("filepathTemplate") or "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    for shard in range(count):
        values = {"DATASET": info["name"], "SPLIT": split["name"], "FILEFORMAT": "tfrecord"}
        values |= {"SHARD_X_OF_Y": f"{shard:05d}-of-{count:05d}", "SHARD_INDEX": f"{shard:05d}"}
        values |= {"NUM_SHARDS": f"{count:05d}"}
        name = re.sub(r"\{(\w+)\}", lambda match, values=values: values[match[1]], template)
        if Path(name).name != name:
            raise ConfigError(
                f"{INFO}: the path {template!r} refers to files outside the data set. Do not use this data set."
            )
        yield name


def _read_json(path: Path) -> Any:
    with convert_read_errors(path):
        return read_json(path)
