"""Read the metadata tables of a data set (episodes and instructions) in LeRobot's layouts v3.0 and v2.1.

The tables are parquet files in v3.0, and JSON lines in v2.1, where each episode also has its own files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from embodyrl.data.layout import (
    CHUNKS_SIZE,
    CODEBASE_VERSION,
    DATA_PATH,
    INFO_PATH,
    TASKS_PATH,
    VIDEO_PATH,
    is_embodyrl_dataset,
)
from embodyrl.errors import ConfigError, EmbodyError, format_reason, one_line
from embodyrl.files import inside, natural_sort_key, read_json, read_json_lines, read_parquet

ONE_FILE_PER_EPISODE = "v2.1"
VERSIONS = (ONE_FILE_PER_EPISODE, CODEBASE_VERSION)
"""Supported versions of LeRobot's layout."""
DATA_FILE = "data/path"
"""Column with the path of an episode's data file, relative to the data set; only in v2.1."""
_EPISODES_LINES, _TASKS_LINES = "meta/episodes.jsonl", "meta/tasks.jsonl"
_LEROBOT_TASK = ("task", "__index_level_0__")
"""Names of the instruction column: lerobot stores a pandas index, with or without a name."""
_LFS = b"version https://git-lfs"
_FETCH = "Download the data set again."
_TEMPLATE_FIELD = re.compile(r"\{(\w+)(?::(0?\d{0,2}d?))?\}")
"""Field of a path template, such as `{episode_index:06d}`: the name and the format."""


def read_info(root: Path) -> dict[str, Any]:
    """Read and check `meta/info.json`.

    Raises:
        ConfigError: the layout has a version that cannot be read.
        EmbodyError: the file does not describe features.
    """
    info = read_json(root / INFO_PATH)
    features = info.get("features") if isinstance(info, dict) else None
    if not isinstance(features, dict) or not all(
        isinstance(feature, dict) and "dtype" in feature for feature in features.values()
    ):
        raise EmbodyError(f"{root / INFO_PATH} has no features, or a feature has no dtype. {_FETCH}")
    version = info.get("codebase_version")
    if version not in VERSIONS:
        fix = (
            f"Convert it to {ONE_FILE_PER_EPISODE} with lerobot 0.3: "
            "python -m lerobot.datasets.v21.convert_dataset_v20_to_v21 --repo-id=OWNER/NAME."
            if version == "v2.0"
            else f"Write it with a version of lerobot whose layout is {CODEBASE_VERSION}."
        )
        raise ConfigError(
            f"data.path={root} has LeRobot's layout {version}, expected one of {', '.join(VERSIONS)}. {fix}"
        )
    return info


def get_video_path(episode: Mapping[str, Any], column: str) -> str:
    """Return the video file of a camera in an episode, relative to the data set."""
    prefix = f"videos/{column}"
    indices = {name: int(episode[f"{prefix}/{name}"]) for name in ("chunk_index", "file_index")}
    return episode.get(f"{prefix}/path") or VIDEO_PATH.format(video_key=column, **indices)


def get_data_path(episode: Mapping[str, Any]) -> str:
    """Return the path of an episode's data file, relative to the data set, from the episode's row of meta/episodes."""
    return DATA_PATH.format(chunk_index=episode["data/chunk_index"], file_index=episode["data/file_index"])


def read_episodes(root: Path) -> list[dict[str, Any]]:
    """Read the rows of meta/episodes with the columns of v3.0, in order; empty if the folder is missing.

    Raises:
        EmbodyError: a file of the table is damaged, or a path template has unknown fields.
    """
    if is_embodyrl_dataset(root) or not (root / INFO_PATH).is_file():
        return _read_stored_episodes(root)
    info = read_info(root)
    if info["codebase_version"] == ONE_FILE_PER_EPISODE:
        return _read_line_episodes(root, info)
    rows, template = _renumber_steps(_read_stored_episodes(root)), info.get("video_path") or VIDEO_PATH
    for row in rows:
        for column in [name for name in row if name.startswith("videos/") and name.endswith("/chunk_index")]:
            key = column.removeprefix("videos/").removesuffix("/chunk_index")
            indices = {name: row.get(f"videos/{key}/{name}") for name in ("chunk_index", "file_index")}
            if None not in indices.values():  # reported where the videos are read
                row[f"videos/{key}/path"] = fill_template(root, template, video_key=key, **indices)
    return rows


def _read_stored_episodes(root: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted((root / "meta" / "episodes").glob("chunk-*/file-*.parquet"), key=natural_sort_key):
        with convert_read_errors(path):
            rows += read_parquet(find_file(root, path.relative_to(root))).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _renumber_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Renumber the steps in the episode rows of third-party data from 0, without gaps (see `find_rows`).

    Overlapping or inconsistent episodes stay unchanged, and are reported by the checks.
    """
    names = ("dataset_from_index", "dataset_to_index", "length")
    bounds: list[list[Any]] = [[row.get(name) for name in names] for row in rows]
    if any(None in bound or bound[1] - bound[0] != bound[2] for bound in bounds):
        return rows
    if any(first[1] > second[0] for first, second in itertools.pairwise(bounds)):
        return rows
    start = 0
    for row in rows:
        row |= {"dataset_from_index": start, "dataset_to_index": start + row["length"]}
        start += row["length"]
    return rows


def _read_line_episodes(root: Path, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the rows of meta/episodes.jsonl (v2.1), converted to the columns of v3.0."""
    cameras = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    rows: list[dict[str, Any]] = []
    start = 0
    lines = _read_lines(root, _EPISODES_LINES, episode_index=int, length=int)
    for line in sorted(lines, key=lambda line: line["episode_index"]):
        number, length = line["episode_index"], line["length"]
        chunk = number // int(info.get("chunks_size") or CHUNKS_SIZE)
        template_fields = {"episode_chunk": chunk, "episode_index": number}
        row = {"episode_index": number, "tasks": [*(line.get("tasks") or ())], "length": length}
        row |= {DATA_FILE: fill_template(root, info.get("data_path"), **template_fields)}
        row |= {"dataset_from_index": start, "dataset_to_index": start + length}
        for key in cameras:
            video_fields = {"chunk_index": chunk, "file_index": number, "from_timestamp": 0.0}
            video_fields |= {"to_timestamp": length / float(info["fps"])}
            video_fields |= {"path": fill_template(root, info.get("video_path"), video_key=key, **template_fields)}
            row |= {f"videos/{key}/{name}": value for name, value in video_fields.items()}
        rows.append(row)
        start += length
    if len(rows) != info.get("total_episodes", len(rows)):
        raise EmbodyError(
            f"{root / INFO_PATH} declares {info['total_episodes']} episodes, but {_EPISODES_LINES} has {len(rows)}. "
            f"{_FETCH}"
        )
    return rows


def read_tasks(root: Path) -> dict[int, str]:
    """Read the instructions by task index.

    Raises:
        EmbodyError: the file is missing or damaged.
    """
    if not is_embodyrl_dataset(root) and read_info(root)["codebase_version"] == ONE_FILE_PER_EPISODE:
        lines = _read_lines(root, _TASKS_LINES, task_index=int, task=str)
        return _check_tasks(root / _TASKS_LINES, [(line["task_index"], line["task"]) for line in lines])
    path = root / TASKS_PATH
    with convert_read_errors(path):
        table = read_parquet(find_file(root, TASKS_PATH))
    text = next((name for name in _LEROBOT_TASK if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise EmbodyError(
            f"{path} has the columns {', '.join(table.column_names)}, expected task_index and task. "
            "Download the data set again."
        )
    return _check_tasks(path, list(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True)))


def _check_tasks(path: Path, rows: list[tuple[Any, Any]]) -> dict[int, str]:
    """Return the instructions by task index, in ascending order.

    Raises:
        EmbodyError: an instruction has no number, or a number has two instructions.
    """
    tasks: dict[int, str] = {}
    for number, task in rows:
        if not isinstance(number, int | float) or number != int(number):
            raise EmbodyError(f"{path}: task_index of '{task}' is {number}, expected a number. {_FETCH}")
        text = str(task or "")
        if (existing := tasks.setdefault(int(number), text)) != text:
            raise EmbodyError(f"{path}: task_index {number} has two instructions, '{existing}' and '{text}'. {_FETCH}")
    return dict(sorted(tasks.items()))


def _read_lines(root: Path, name: str, **fields: type) -> list[dict[str, Any]]:
    """Read a file of JSON lines, and check the types of the given fields."""
    path, rows = find_file(root, name), []
    with convert_read_errors(path):
        for number, row in read_json_lines(path):
            for field, kind in fields.items():
                if not isinstance(row, dict) or not isinstance(row.get(field), kind):
                    raise EmbodyError(
                        f"{path}, line {number}: the field {field} is missing, or is not of type {kind.__name__}. "
                        f"{_FETCH}"
                    )
            rows.append(row)
    return rows


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Raise an EmbodyError with the path if the block, which reads this file, fails."""
    try:
        yield
    except FileNotFoundError:
        raise EmbodyError(f"{path} is missing. {_FETCH}") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        with suppress(OSError), open(path, "rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise EmbodyError(f"{path} is a Git LFS pointer. Fetch the files: git lfs pull.") from None
        reason = one_line(error).rstrip(".")
        raise EmbodyError(f"{path} cannot be read: {reason}. Download or collect the data set again.") from error


def find_file(root: Path, name: str | Path) -> Path:
    """Return the path of a file in a folder, for example of a data set; the name may come from untrusted metadata.

    Raises:
        EmbodyError: the file is outside the folder, or a device or pipe.
    """
    try:
        return inside(root, name)
    except (OSError, ValueError) as error:
        raise EmbodyError(f"{root}: {error}. Copy the file into the folder, or use another folder.") from None


def fill_template(root: Path, template: str | None, **values: Any) -> str:
    """Fill in a path template of `meta/info.json`; return the path relative to the data set.

    Raises:
        EmbodyError: the template has unknown fields.
    """
    if not template:
        raise EmbodyError(f"{root / INFO_PATH} has no path template for data or videos. {_FETCH}")
    try:
        if re.search("[{}]", _TEMPLATE_FIELD.sub("", template)):
            raise ValueError("it has an unpaired brace, or a field that is not {NAME} or {NAME:03d}")
        path = _TEMPLATE_FIELD.sub(lambda match: format(values[match[1]], match[2] or ""), template)
    except (KeyError, ValueError, TypeError) as error:
        raise EmbodyError(
            f"{root / INFO_PATH}: the path {template!r} is not a valid template ({format_reason(error)}). Fields: "
            f"{', '.join(values)}."
        ) from None
    return str(PurePosixPath(path))
