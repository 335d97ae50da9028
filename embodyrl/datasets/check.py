"""Is a data set complete and consistent? Reads metadata and columns of numbers, never frames."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.datasets import layout
from embodyrl.datasets.layout import Card
from embodyrl.datasets.writer import paths_of, read_episodes
from embodyrl.errors import EmbodyError

_COUNTERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_TOLERANCE_S = 1e-4
"""Largest deviation of a time stamp from frame_index / fps that readers of this layout accept."""

_Rows = list[dict[str, Any]]


def check_layout(root: Path) -> list[str]:
    """Return what is wrong with a data set of ours, one line each; an empty list if nothing is."""
    problems: list[str] = []
    try:
        card, rows = layout.read_card(root), read_episodes(root)
    except EmbodyError as error:
        return [f"{root} cannot be read: {error}"]
    for part in (_info, _tasks, _stats, _episodes):
        try:
            problems += part(root, card, rows)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            problems.append(f"{root}: {part.__name__.strip('_')} cannot be read: {error!r}.")
    return problems


def _task_names(rows: _Rows) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row["tasks"]))


def _info(root: Path, card: Card, rows: _Rows) -> Iterator[str]:
    found = json.loads((root / layout.INFO_PATH).read_text(encoding="utf-8"))
    frames = rows[-1]["dataset_to_index"] if rows else 0
    expected = layout.info_of(card, episodes=len(rows), frames=frames, tasks=len(_task_names(rows)))
    for key, value in expected.items():
        if found.get(key) != value:
            yield f"{layout.INFO_PATH}: {key} is {found.get(key)!r}, expected {value!r}."


def _tasks(root: Path, card: Card, rows: _Rows) -> Iterator[str]:
    if not pq.read_table(root / layout.TASKS_PATH).equals(layout.tasks_table(_task_names(rows)), check_metadata=True):
        yield f"{layout.TASKS_PATH}: not the {len(_task_names(rows))} instructions of the episodes, in their order."


def _stats(root: Path, card: Card, rows: _Rows) -> Iterator[str]:
    stats = json.loads((root / layout.STATS_PATH).read_text(encoding="utf-8"))
    for key, feature in layout.features_of(card).items() if rows else ():
        image = feature["dtype"] in ("image", "video")
        if key not in stats and (image or key in (layout.STATE, layout.ACTION)):
            yield f"{layout.STATS_PATH}: no statistics of '{key}'."
        for name, values in stats.get(key, {}).items():
            shape = (1,) if name == "count" else (3, 1, 1) if image else tuple(feature["shape"])
            if np.shape(values) != shape:
                yield f"{layout.STATS_PATH}: {key}/{name} has shape {np.shape(values)}, expected {shape}."


def _episodes(root: Path, card: Card, rows: _Rows) -> Iterator[str]:
    opened: dict[str, pa.Table] = {}
    named: set[str] = set()
    names, start = _task_names(rows), 0
    for number, row in enumerate(rows):
        if row["episode_index"] != number or row["dataset_from_index"] != start:
            yield f"meta/episodes: row {number} is episode {row['episode_index']} from {row['dataset_from_index']}."
            return
        start = row["dataset_to_index"]
        if start - row["dataset_from_index"] != row["length"]:
            yield f"meta/episodes: episode {number} has length {row['length']}, but its indices say otherwise."
        paths = paths_of(card, row)
        missing = [path for path in paths if not (root / path).is_file()]
        if missing:
            yield f"{missing[0]} of episode {number} is missing."
            return
        if paths[0] not in opened:
            if not pq.read_schema(root / paths[0]).equals(layout.schema_of(card)):
                yield f"{paths[0]}: columns differ from those of meta/info.json."
            opened[paths[0]] = pq.read_table(root / paths[0], columns=list(_COUNTERS))
        named.update(paths)
        yield from _row_problems(opened[paths[0]], row, card, names.index(row["tasks"][0]))
    total = sum(table.num_rows for table in opened.values())
    if total != start:
        yield f"data: the files hold {total} rows, the table of episodes names {start}."
    there = {p.relative_to(root).as_posix() for top in ("data", "videos") for p in (root / top).rglob("file-*")}
    yield from (f"{path}: no episode names this file." for path in sorted(there - named))


def _row_problems(table: pa.Table, row: dict[str, Any], card: Card, task: int) -> Iterator[str]:
    number, length = row["episode_index"], row["length"]
    mask = table["episode_index"].to_numpy() == number
    found = {name: table[name].to_numpy()[mask] for name in _COUNTERS}
    if int(mask.sum()) != length:
        yield f"episode {number}: {int(mask.sum())} rows in its file, expected {length}."
        return
    steps = np.arange(length)
    if (found["frame_index"] != steps).any() or (found["index"] != row["dataset_from_index"] + steps).any():
        yield f"episode {number}: frame_index or index do not count up."
    if np.abs(found["timestamp"] - steps / card.fps).max() > _TOLERANCE_S:
        yield f"episode {number}: time stamps are not frame_index / fps."
    if (found["task_index"] != task).any():
        yield f"episode {number}: task_index is not {task}, the number of its instruction."
