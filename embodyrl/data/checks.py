"""Checks of the consistency of a data set's files, and comparisons of data sets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.data import layout
from embodyrl.data.cards import PLAIN, read_stored_card
from embodyrl.data.layout import Card
from embodyrl.data.rows import Rows, find_rows
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.tables import read_episodes, read_tasks
from embodyrl.data.writer import get_episode_paths
from embodyrl.errors import ConfigError, EmbodyError, format_reason
from embodyrl.files import read_json, read_parquet
from embodyrl.policies.inputs import describe_gripper
from embodyrl.types import EnvSpec

_SHAPE = ("cameras", "image_size", "image_rotation_deg", "state_dim", "action_dim", "gripper")
"""Keys of `ENV_FIELDS` that determine the shape and the meaning of observations and actions."""
_FPS_TOLERANCE = 0.01
"""Maximum relative difference of frame rates that count as equal, for example 29.97 and 30."""
_TOLERANCE_S = 1e-4
"""Maximum difference between a timestamp and frame_index / fps that LeRobot accepts, in seconds."""

_Episodes = list[dict[str, Any]]


def check_layout(root: Path, data: DemonstrationSettings = PLAIN) -> list[str]:
    """Return the errors of a data set, one line each.

    A data set of another program is checked only for properties that would be misinterpreted.

    Raises:
        ConfigError: the data set has another format, or contradicts the keys that describe it.
    """
    problems: list[str] = []
    try:
        card, rows = read_stored_card(root, data), read_episodes(root)
    except ConfigError:
        raise
    except EmbodyError as error:
        return [f"{root} cannot be read: {error}"]
    for part in (
        (_check_info, _check_tasks, _check_episodes) if layout.is_embodyrl_dataset(root) else (_check_episodes,)
    ):
        name = part.__name__.removeprefix("_check_")
        try:
            problems += part(root, card, rows)
        except EmbodyError as error:
            problems.append(f"{name}: {error}")
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{root}: {name} cannot be read: {format_reason(error)}.")
    return problems


def describe_differences(first: EnvSpec, second: EnvSpec, *extra_fields: str) -> str:
    """Describe the fields in which two environment specs differ; `extra_fields` names additional fields to compare."""
    getters = {name: attrgetter(layout.ENV_FIELDS[name]) for name in (*extra_fields, *_SHAPE)}
    differing = {name: (get(first), get(second)) for name, get in getters.items() if get(first) != get(second)}
    texts = {
        name: map(describe_gripper, pair) if name == "gripper" else map(str, pair) for name, pair in differing.items()
    }
    return ", ".join(f"{name} ({' and '.join(pair)})" for name, pair in texts.items())


def describe_dataset_differences(
    first: tuple[Path, Card], second: tuple[Path, Card], *extra_fields: str, data: DemonstrationSettings = PLAIN
) -> str:
    """Describe the differences between two data sets (folder, card) that prevent training on both.

    Compared are the fields of `describe_differences`, the frame rate, and the order of named dimensions.
    """
    text, rates = describe_differences(first[1].env, second[1].env, *extra_fields), (first[1].fps, second[1].fps)
    if not text and not math.isclose(*rates, rel_tol=_FPS_TOLERANCE):
        return "fps ({:g} and {:g})".format(*rates)
    for key in () if text else (data.action_key, data.state_key):
        features = [_read_feature(root / layout.INFO_PATH, key) for root, _ in (first, second)]
        names = [layout.get_dimension_names(feature) for feature in features]
        if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
            return f"the order of '{key}' ({', '.join(names[0])} and {', '.join(names[1])})"
    return text


def _read_feature(path: Path, key: str) -> dict[str, Any]:
    try:
        return read_json(path)["features"].get(key) or {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EmbodyError(f"{path} cannot be read: {format_reason(error)}. Use another data set.") from error


def _list_task_names(rows: _Episodes) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row["tasks"]))


def _check_info(root: Path, card: Card, rows: _Episodes) -> Iterator[str]:
    info = read_json(root / layout.INFO_PATH)
    frames = rows[-1]["dataset_to_index"] if rows else 0
    expected = layout.build_info(card, episodes=len(rows), frames=frames, tasks=len(_list_task_names(rows)))
    for key, value in expected.items():
        if info.get(key) != value:
            yield f"{layout.INFO_PATH}: {key} is {info.get(key)!r}, expected {value!r}."


def _check_tasks(root: Path, card: Card, rows: _Episodes) -> Iterator[str]:
    names = _list_task_names(rows)
    if not read_parquet(root / layout.TASKS_PATH).equals(layout.build_tasks_table(names), check_metadata=True):
        yield f"{layout.TASKS_PATH} does not list the {len(names)} instructions of the episodes in order."


def _check_episodes(root: Path, card: Card, rows: _Episodes) -> Iterator[str]:
    is_own = layout.is_embodyrl_dataset(root)
    if problems := [*_check_episode_table(rows, exact=is_own), *(_check_files(root, card, rows) if is_own else ())]:
        yield from problems
        return
    all_rows, total = find_rows(root, rows), rows[-1]["dataset_to_index"] if rows else 0
    if len(all_rows) != total:
        yield f"data: the files contain {len(all_rows)} rows, but meta/episodes lists {total}."
        return
    wrong = np.flatnonzero(all_rows.indices["index"] != np.arange(total))
    if len(wrong):
        yield f"data: index is not consecutive: row {wrong[0]} is missing or duplicated."
        return
    names = dict(enumerate(_list_task_names(rows))) if is_own else read_tasks(root)
    for row in rows:
        yield from _check_rows(all_rows, row, card, names, exact=is_own)


def _check_episode_table(rows: _Episodes, *, exact: bool) -> Iterator[str]:
    """Yield errors of the episode table; with `exact`, gaps in the episode numbers are also errors."""
    start, last = 0, -1
    for place, row in enumerate(rows):
        number = row["episode_index"]
        if number <= last or (exact and number != place) or row["dataset_from_index"] != start:
            yield (
                f"meta/episodes: row {place} is episode {number} from {row['dataset_from_index']}, "
                f"expected episode {last + 1} from {start}; number the episodes and rows from 0 without gaps."
            )
            return
        last = number
        start = row["dataset_to_index"]
        if start - row["dataset_from_index"] != row["length"] or row["length"] < 1:
            yield f"meta/episodes: episode {number} has length {row['length']}, which does not match its indices."


def _check_files(root: Path, card: Card, rows: _Episodes) -> Iterator[str]:
    """Yield one line per file that is missing, has unexpected columns, or is not part of an episode."""
    referenced: set[str] = set()
    for number, row in enumerate(rows):
        paths = get_episode_paths(card, row)
        if missing := [path for path in paths if not (root / path).is_file()]:
            yield f"{missing[0]} of episode {number} is missing."
            return
        if paths[0] not in referenced and not pq.read_schema(root / paths[0]).equals(layout.build_schema(card)):
            yield f"{paths[0]}: the columns differ from those in meta/info.json."
        referenced.update(paths)
    existing = {p.relative_to(root).as_posix() for top in ("data", "videos") for p in (root / top).rglob("file-*")}
    yield from (f"{path}: no episode refers to this file." for path in sorted(existing - referenced))


def _check_rows(
    all_rows: Rows, row: dict[str, Any], card: Card, names: dict[int, str], *, exact: bool
) -> Iterator[str]:
    number, span = row["episode_index"], slice(row["dataset_from_index"], row["dataset_to_index"])
    indices = {name: values[span] for name, values in all_rows.indices.items()}
    mismatches = np.flatnonzero(indices["episode_index"] != number)
    if len(mismatches):
        yield (
            f"episode {number}: its row {mismatches[0]} has episode_index "
            f"{indices['episode_index'][mismatches[0]]}; the rows and the table of episodes do not match."
        )
        return
    steps = np.arange(row["length"])
    # Trimmed episodes of other programs may begin at another frame.
    if (indices["frame_index"] - (0 if exact else indices["frame_index"][0]) != steps).any():
        yield f"episode {number}: frame_index is not consecutive."
    if exact and not (np.abs(indices["timestamp"] - steps / card.fps) <= _TOLERANCE_S).all():
        yield f"episode {number}: time stamps are not frame_index / fps."
    gaps = np.diff(indices["timestamp"].astype(np.float64))
    uneven = np.flatnonzero(~(np.abs(gaps - 1 / card.fps) < 0.5 / card.fps))
    if not exact and len(uneven):
        yield (
            f"episode {number}: step {uneven[0] + 1} is {gaps[uneven[0]]:.4f} s after the previous step, but fps "
            f"{card.fps:g} means {1 / card.fps:.4f} s."
        )
    listed = {task or "" for task in row.get("tasks") or ()}
    for task in np.unique(indices["task_index"]).tolist():
        if task not in names:
            yield f"episode {number}: {layout.TASKS_PATH} has no task_index {task}."
        elif listed and names[task] not in listed:
            yield f"episode {number}: task_index {task} is '{names[task]}', but meta/episodes has {sorted(listed)}."
