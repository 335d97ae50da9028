"""Does a folder follow the layout? Reads metadata and columns of numbers, never frames."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.datasets import layout
from embodyrl.datasets.writer import read_episodes

_INFO_FIELDS: dict[str, type | tuple[type, ...]] = {
    "codebase_version": str,
    "total_episodes": int,
    "total_frames": int,
    "total_tasks": int,
    "chunks_size": int,
    "fps": int,
    "splits": dict,
    "data_path": str,
    "features": dict,
}
_EPISODE_COLUMNS = (
    "episode_index",
    "tasks",
    "length",
    "data/chunk_index",
    "data/file_index",
    "dataset_from_index",
    "dataset_to_index",
    "meta/episodes/chunk_index",
    "meta/episodes/file_index",
)
_DEFAULT_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_TOLERANCE_S = 1e-4
"""Largest deviation of a time stamp from frame_index / fps that readers of this layout accept."""


def check_layout(root: Path) -> list[str]:
    """Return what is wrong with a LeRobot v3.0 data set, one line each; an empty list if nothing is."""
    info, problem = _json(root / layout.INFO_PATH)
    if problem:
        return [problem]
    problems = list(_info_problems(info))
    if problems:
        return problems
    for part in (_tasks, _stats, _episodes):
        try:
            problems += part(root, info)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            problems.append(f"{root}: {part.__name__.strip('_')} cannot be read: {error!r}.")
    return problems


def _info_problems(info: dict[str, Any]) -> Iterator[str]:
    for name, kind in _INFO_FIELDS.items():
        if not isinstance(info.get(name), kind):
            yield f"{layout.INFO_PATH}: '{name}' is {info.get(name)!r}, expected {kind}."
            return
    if info["codebase_version"] != layout.CODEBASE_VERSION:
        yield f"{layout.INFO_PATH}: codebase_version {info['codebase_version']}, expected {layout.CODEBASE_VERSION}."
    for name, feature in info["features"].items():
        if "/" in name:
            yield f"{layout.INFO_PATH}: feature name '{name}' contains '/'."
        if not isinstance(feature.get("shape"), list) or "dtype" not in feature or "names" not in feature:
            yield f"{layout.INFO_PATH}: feature '{name}' lacks dtype, shape or names."
    for name in _DEFAULT_FEATURES:
        if name not in info["features"]:
            yield f"{layout.INFO_PATH}: feature '{name}' is missing."
    if info["splits"].get("train") != f"0:{info['total_episodes']}":
        yield f"{layout.INFO_PATH}: splits {info['splits']} do not cover {info['total_episodes']} episodes."
    if any(f["dtype"] == "video" for f in info["features"].values()) and not info.get("video_path"):
        yield f"{layout.INFO_PATH}: there are video features but no video_path."


def _tasks(root: Path, info: dict[str, Any]) -> Iterator[str]:
    table = pq.read_table(root / layout.TASKS_PATH)
    if not {"task_index", "task"} <= set(table.column_names):
        yield f"{layout.TASKS_PATH}: columns {table.column_names}, expected task_index and the index 'task'."
        return
    if json.loads(table.schema.metadata.get(b"pandas", b"{}")).get("index_columns") != ["task"]:
        yield f"{layout.TASKS_PATH}: the instruction is not the data frame's index."
    indices = table["task_index"].to_pylist()
    if indices != list(range(info["total_tasks"])) or len(set(table["task"].to_pylist())) != len(indices):
        yield f"{layout.TASKS_PATH}: {len(indices)} rows, expected {info['total_tasks']} different ones from 0."


def _stats(root: Path, info: dict[str, Any]) -> Iterator[str]:
    stats, problem = _json(root / layout.STATS_PATH)
    if problem:
        yield problem
        return
    for key, feature in info["features"].items():
        is_image = feature["dtype"] in ("image", "video")
        if key not in stats:
            if is_image or key in (layout.STATE, layout.ACTION):
                yield f"{layout.STATS_PATH}: no statistics of '{key}'."
            continue
        shape = (3, 1, 1) if is_image else tuple(feature["shape"])
        for name in ("min", "max", "mean", "std", "count"):
            found = np.shape(stats[key].get(name))
            if found != ((1,) if name == "count" else shape):
                yield f"{layout.STATS_PATH}: {key}/{name} has shape {found}, expected {shape}."


def _episodes(root: Path, info: dict[str, Any]) -> Iterator[str]:
    rows = read_episodes(root)
    if len(rows) != info["total_episodes"]:
        yield f"meta/episodes: {len(rows)} rows, {layout.INFO_PATH} says {info['total_episodes']}."
        return
    opened: dict[Path, pa.Table] = {}
    start = 0
    for number, row in enumerate(rows):
        missing = [name for name in _EPISODE_COLUMNS if name not in row]
        if missing:
            yield f"meta/episodes: column '{missing[0]}' is missing."
            return
        if row["episode_index"] != number or row["dataset_from_index"] != start:
            yield f"meta/episodes: row {number} is episode {row['episode_index']} from {row['dataset_from_index']}."
            return
        start = row["dataset_to_index"]
        if start - row["dataset_from_index"] != row["length"]:
            yield f"meta/episodes: episode {number} has length {row['length']}, but its indices say otherwise."
        yield from _video_problems(root, info, row)
        place = {name: row[f"data/{name}"] for name in ("chunk_index", "file_index")}
        path = root / info["data_path"].format(**place)
        if path not in opened:
            if not path.is_file():
                yield f"{path.relative_to(root)} of episode {number} is missing."
                return
            opened[path] = _numbers(path)
            yield from _schema_problems(path, info)
        yield from _rows_problems(opened[path], row, info)
    if start != info["total_frames"]:
        yield f"meta/episodes: {start} frames, {layout.INFO_PATH} says {info['total_frames']}."
    total = sum(table.num_rows for table in opened.values())
    if total != start:
        yield f"data: the files hold {total} rows, the table of episodes names {start}."
    surplus = {p for p in (root / "data").rglob("*.parquet")} - set(opened)
    yield from (f"{path.relative_to(root)}: no episode names this file." for path in sorted(surplus))


def _numbers(path: Path) -> pa.Table:
    return pq.read_table(path, columns=list(_DEFAULT_FEATURES))


def _schema_problems(path: Path, info: dict[str, Any]) -> Iterator[str]:
    schema = pq.read_schema(path)
    for key, feature in info["features"].items():
        if feature["dtype"] == "video":
            continue
        if key not in schema.names:
            yield f"{path.name}: column '{key}' is missing."
            continue
        found = schema.field(key).type
        if not _fits(found, feature):
            yield f"{path.name}: column '{key}' is {found}, expected {feature['dtype']} {feature['shape']}."


def _fits(found: pa.DataType, feature: dict[str, Any]) -> bool:
    if feature["dtype"] == "image":
        return pa.types.is_struct(found) and {f.name for f in found} == {"bytes", "path"}
    if feature["shape"] == [1]:
        return _is(found, feature)
    if pa.types.is_fixed_size_list(found):
        return [found.list_size] == feature["shape"] and _is(found.value_type, feature)
    return pa.types.is_list(found) and _is(found.value_type, feature)


def _is(found: pa.DataType, feature: dict[str, Any]) -> bool:
    return found == pa.type_for_alias(feature["dtype"])


def _rows_problems(table: pa.Table, row: dict[str, Any], info: dict[str, Any]) -> Iterator[str]:
    number, length = row["episode_index"], row["length"]
    mask = table["episode_index"].to_numpy() == number
    found = {name: table[name].to_numpy()[mask] for name in _DEFAULT_FEATURES}
    if int(mask.sum()) != length:
        yield f"episode {number}: {int(mask.sum())} rows in its file, expected {length}."
        return
    steps = np.arange(length)
    if (found["frame_index"] != steps).any() or (found["index"] != row["dataset_from_index"] + steps).any():
        yield f"episode {number}: frame_index or index do not count up."
    if np.abs(found["timestamp"] - steps / info["fps"]).max() > _TOLERANCE_S:
        yield f"episode {number}: time stamps are not frame_index / fps."
    if not 0 <= found["task_index"].min() <= found["task_index"].max() < info["total_tasks"]:
        yield f"episode {number}: task_index outside 0..{info['total_tasks'] - 1}."


def _video_problems(root: Path, info: dict[str, Any], row: dict[str, Any]) -> Iterator[str]:
    for key, feature in info["features"].items():
        if feature["dtype"] != "video":
            continue
        prefix = f"videos/{key}"
        place = {name: row[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}
        path = info["video_path"].format(video_key=key, **place)
        if not (root / path).is_file():
            yield f"{path} of episode {row['episode_index']} is missing."
        seconds = row[f"{prefix}/to_timestamp"] - row[f"{prefix}/from_timestamp"]
        if abs(seconds - row["length"] / info["fps"]) > _TOLERANCE_S:
            yield f"episode {row['episode_index']}: {seconds} s of video, expected {row['length'] / info['fps']}."


def _json(path: Path) -> tuple[dict[str, Any], str | None]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read: {error}."
    return content if isinstance(content, dict) else {}, None
