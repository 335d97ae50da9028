"""The rows of a data set by number, independent of the files that contain them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.errors import EmbodyError
from embodyrl.extensions.demonstrations.layout import SUCCESS, is_ours
from embodyrl.extensions.demonstrations.tables import DATA_FILE, data_file, video_file
from embodyrl.files import by_number
from embodyrl.types import FloatArray, IntArray

COUNTERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Position and counters of each of N rows, ordered by `index`."""

    files: tuple[Path, ...]
    file: IntArray
    """[N] index of the file in `files`."""
    place: IntArray
    """[N] row within the file."""
    counters: dict[str, npt.NDArray[Any]]
    """[N] values of each column in `COUNTERS`."""

    def __len__(self) -> int:
        return len(self.file)


def find_rows(root: Path, episodes: Sequence[dict[str, Any]]) -> Rows:
    """Find all rows by their column `index`, or by episode and frame where each episode has its own file.

    The file numbers in the table of episodes are not used for v3.0 data of other programs: lerobot's converter from
    v2.1 writes wrong ones where a file ends.

    Raises:
        EmbodyError: a file is missing or damaged, lacks a column, or has the rows of another episode.
    """
    apart = any(DATA_FILE in row for row in episodes)
    named = [row[DATA_FILE] for row in episodes] if apart else map(data_file, episodes) if is_ours(root) else ()
    paths = tuple(root / name for name in dict.fromkeys(named))
    files = paths or tuple(sorted((root / "data").rglob("*.parquet"), key=by_number))
    if not files:
        raise EmbodyError(f"{root / 'data'} contains no .parquet file. Download or collect the data set again.")
    tables = [read_columns(path, COUNTERS) for path in files]
    lengths = [len(table) for table in tables]
    for row, length in zip(episodes, lengths, strict=True) if apart else ():
        if length != row["length"]:
            raise EmbodyError(
                f"{root / row[DATA_FILE]} has {length} rows, but episode {row['episode_index']} has length "
                f"{row['length']} in the table of episodes."
            )
    counters = {name: np.concatenate([table[name].to_numpy().ravel() for table in tables]) for name in COUNTERS}
    file = np.repeat(np.arange(len(files)), lengths)
    order = np.lexsort((counters["frame_index"], file)) if apart else np.argsort(counters["index"], kind="stable")
    found = {name: values[order] for name, values in counters.items()}
    return Rows(
        files=files,
        file=file[order],
        place=np.concatenate([np.arange(length) for length in lengths])[order],
        counters=found | ({"index": np.arange(len(order))} if apart else {}),
    )


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read columns of a file.

    Raises:
        EmbodyError: the file is damaged, or lacks a column.
    """
    try:
        present = pq.read_schema(path).names
        if lacking := [name for name in columns if name not in present]:
            raise EmbodyError(
                f"{path} has no column '{lacking[0]}', which the data set declares. Columns: {', '.join(present)}."
            )
        return pq.read_table(path, columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise EmbodyError(f"{path} cannot be read: {error}. Download or collect the data set again.") from error


def read_vectors(rows: Rows, key: str, width: int) -> FloatArray:
    """Return a column of vectors [N, width]; a missing number is NaN.

    Raises:
        EmbodyError: the column is missing, or its vectors have another length.
    """
    values = np.zeros((len(rows), width), np.float32)
    for number, path in enumerate(rows.files if width else ()):
        column = read_columns(path, (key,))[key].combine_chunks()
        found = _matrix(column)
        if found is None or found.shape[1] != width:
            size = "different lengths" if found is None else f"{found.shape[1]} numbers"
            raise EmbodyError(f"{path}: '{key}' has vectors of {size}, but the data set declares {width}.")
        inside = rows.file == number
        values[inside] = found[rows.place[inside]]
    return values


def read_success(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return the success of each step [N]; a missing value is False.

    Raises:
        EmbodyError: see `read_vectors`.
    """
    return read_vectors(rows, SUCCESS, 1)[:, 0] == 1


def _matrix(column: Any) -> FloatArray | None:
    """Return vectors, or plain numbers, as [n, width]; None if their lengths differ."""
    kind = column.type
    width = 1
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
        if len(set(lengths.tolist()) - {-1}) > 1 or (lengths == 0).any():
            return None
        width = int(lengths.max(initial=1))
        if column.null_count:
            column = pa.array([row or [None] * width for row in column.to_pylist()], pa.list_(kind.value_type))
        column = column.flatten()
    # A number beyond the range of float32 becomes infinite, and is reported like other non-finite numbers.
    with np.errstate(over="ignore"):
        return column.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, max(1, width))


def frame_times(rows: Rows, episode: dict[str, Any], column: str, fps: float) -> tuple[str, npt.NDArray[np.float64]]:
    """Return an episode's video file, relative to the data set, and the timestamp of each step in seconds.

    Raises:
        EmbodyError: a timestamp is outside the episode's part of the video.
    """
    part = slice(episode["dataset_from_index"], episode["dataset_to_index"])
    names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    values: list[Any] = [episode.get(f"videos/{column}/{name}") for name in names]
    if None in values:
        raise EmbodyError(
            f"meta/episodes: episode {episode['episode_index']} has no videos/{column}/{', '.join(names)}. Download "
            "the data set again, or leave this camera out with data.cameras."
        )
    begin, end = map(float, values[2:])
    times = begin + rows.counters["timestamp"][part].astype(np.float64)
    outside = np.flatnonzero((times < begin - 0.5 / fps) | (times > end - 0.5 / fps))
    if len(outside):
        raise EmbodyError(
            f"episode {episode['episode_index']}, step {outside[0]}: time {times[outside[0]]:.3f} s of '{column}' is "
            f"outside the episode's segment {begin:.3f}..{end:.3f} s of its video. Download the data set again."
        )
    return video_file(episode, column), times


def non_finite(
    rows: Rows, episodes: Sequence[dict[str, Any]], columns: dict[str, FloatArray]
) -> Iterator[tuple[int, int, str]]:
    """Yield episode, step and a description of each row that has a non-finite number in a column."""
    for name, values in columns.items():
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist():
            index = int(rows.counters["episode_index"][row])
            start = episodes[index]["dataset_from_index"]
            place = int(np.flatnonzero(~np.isfinite(values[row]))[0])
            yield index, row - start, f"{name}[{place}] is {values[row, place]}"
