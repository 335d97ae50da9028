"""Index of the rows (env steps) of a data set over all its files, and readers of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.data.layout import SUCCESS, is_embodyrl_dataset
from embodyrl.data.tables import DATA_FILE, convert_read_errors, find_file, get_data_path
from embodyrl.errors import EmbodyError
from embodyrl.files import VALUE_BYTES, available_bytes, read_parquet, visible_files
from embodyrl.types import FloatArray, IntArray

_RESOLUTION = 1e-3
"""Maximum distance between adjacent float32 values of a column, as a fraction of the column's range."""
INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """File positions and index columns of the N rows of a data set, ordered by `index`."""

    files: tuple[Path, ...]
    file: IntArray
    """[N] index of the file in `files`."""
    row_in_file: IntArray
    """[N] index of the row within its file."""
    indices: dict[str, npt.NDArray[Any]]
    """Values [N] of each column in `INDEX_COLUMNS`."""

    def __len__(self) -> int:
        return len(self.file)


def find_rows(root: Path, episodes: Sequence[dict[str, Any]]) -> Rows:
    """Find the file position of each row, by the column `index`, or by episode and frame for v2.1.

    For v3.0 data of other programs, the file numbers in meta/episodes are not used: the v2.1 converter of lerobot
    writes wrong numbers for episodes at the end of a file.

    Raises:
        EmbodyError: a file is missing, damaged or outside the data set, lacks a column, or has the rows of another
            episode.
    """
    has_file_per_episode = any(DATA_FILE in row for row in episodes)
    if has_file_per_episode:
        listed = [row[DATA_FILE] for row in episodes]
    else:
        listed = map(get_data_path, episodes) if is_embodyrl_dataset(root) else ()
    names = dict.fromkeys(listed) or [path.relative_to(root) for path in visible_files(root / "data", ".parquet")]
    files = tuple(find_file(root, name) for name in names)
    if not files:
        raise EmbodyError(f"{root / 'data'} contains no .parquet file. Download or collect the data set again.")
    tables: list[pa.Table] = []
    for path in files:
        tables.append(read_columns(path, INDEX_COLUMNS))
        if VALUE_BYTES * len(INDEX_COLUMNS) * sum(map(len, tables)) > available_bytes() // 4:
            raise EmbodyError(f"{root} has too many rows for the free memory. Split the data set.")
    lengths = [len(table) for table in tables]
    for row, length in zip(episodes, lengths, strict=True) if has_file_per_episode else ():
        if length != row["length"]:
            raise EmbodyError(
                f"{root / row[DATA_FILE]} has {length} rows, but episode {row['episode_index']} has length "
                f"{row['length']} in the episode table. Download the data set again."
            )
    indices = {
        name: np.concatenate([_read_scalars(path, table, name) for path, table in zip(files, tables, strict=True)])
        for name in INDEX_COLUMNS
    }
    file = np.repeat(np.arange(len(files)), lengths)
    order = np.lexsort((indices["frame_index"], file) if has_file_per_episode else (indices["index"],))
    sorted_values = {name: values[order] for name, values in indices.items()}
    # Data of other programs may lack deleted episodes; the checks report a repeated index.
    has_file_per_episode = has_file_per_episode or (
        not is_embodyrl_dataset(root) and bool((np.diff(sorted_values["index"]) > 0).all())
    )
    return Rows(
        files=files,
        file=file[order],
        row_in_file=np.concatenate([np.arange(length) for length in lengths])[order],
        indices=sorted_values | ({"index": np.arange(len(order))} if has_file_per_episode else {}),
    )


def _read_scalars(path: Path, table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column as numbers [n]; the file can contain numbers or vectors of length 1."""
    column = table[name].combine_chunks()
    column = column.flatten() if _is_list(column.type) else column
    if len(column) != len(table) or not _is_number(column.type):
        raise EmbodyError(
            f"{path}: '{name}' has the type {table[name].type}, expected one number per row. "
            "Download the data set again."
        )
    return column.to_numpy(zero_copy_only=False)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return any(
        is_type(kind) for is_type in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    )


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read the named columns of a parquet file.

    Raises:
        EmbodyError: the file is damaged, or lacks a column.
    """
    with convert_read_errors(path):
        present = pq.read_schema(path).names
        if missing := [name for name in columns if name not in present]:
            raise EmbodyError(
                f"{path} has no column '{missing[0]}', which the data set declares. Columns: {', '.join(present)}. "
                "Download the data set again."
            )
        return read_parquet(path, columns)


def read_vectors(rows: Rows, key: str, width: int, warnings: list[str] | None = None) -> FloatArray:
    """Return a column as vectors [N, width]; missing values are NaN.

    Args:
        rows: rows of the data set.
        key: name of the column.
        width: declared length of the vectors.
        warnings: list to which warnings about values that lose precision in float32 are appended.

    Raises:
        EmbodyError: the column is missing, or its vectors have another length or another type.
    """
    lossy: set[int] = set()
    values = np.zeros((len(rows), width), np.float32)
    for number, path in enumerate(rows.files if width else ()):
        column, in_file = read_columns(path, (key,))[key].combine_chunks(), rows.file == number
        lengths = _get_lengths(column)
        mismatches = np.flatnonzero((lengths != width) & (lengths >= 0))
        if len(mismatches) == len(lengths) and len(mismatches):
            raise EmbodyError(
                f"{path}: '{key}' has vectors of {lengths[0]} numbers, but the data set declares {width}. "
                "Correct meta/info.json."
            )
        if len(mismatches):
            row = np.flatnonzero(in_file & (rows.row_in_file == mismatches[0]))[0]
            raise EmbodyError(
                f"{path}: episode {rows.indices['episode_index'][row]}, frame {rows.indices['frame_index'][row]}: "
                f"'{key}' has {lengths[mismatches[0]]} numbers, but the data set declares {width}. Correct the file."
            )
        matrix = _to_matrix(column, width)
        if matrix is None:
            raise EmbodyError(
                f"{path}: '{key}' has the type {column.type}, expected vectors of numbers. Download the data set again."
            )
        lossy |= _find_lossy(matrix)
        values[in_file] = _to_float32(matrix)[rows.row_in_file[in_file]]
    if lossy and warnings is not None:
        warnings.append(
            f"'{key}', dimensions {sorted(lossy)}: the values differ by less than float32 can represent, so policies "
            "receive nearly equal values. Subtract a constant, or remove these dimensions."
        )
    return values


def read_success(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return the success flag of each step [N]; a missing value is False.

    Raises:
        EmbodyError: see `read_vectors`.
    """
    return read_vectors(rows, SUCCESS, 1)[:, 0] == 1


def _get_lengths(column: Any) -> IntArray:
    """Return the length of each vector [n]; 1 for plain numbers, -1 for missing vectors."""
    if not _is_list(column.type):
        return np.ones(len(column), np.int64)
    return column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _to_matrix(column: Any, width: int) -> npt.NDArray[Any] | None:
    """Return a column of vectors or numbers as an array [n, width]; None if the column is not numeric."""
    kind = column.type.value_type if _is_list(column.type) else column.type
    if not _is_number(kind):
        return None
    if _is_list(column.type):
        if column.null_count:
            column = pa.array([row or [None] * width for row in column.to_pylist()], pa.list_(kind))
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False).reshape(-1, width)


def _to_float32(values: npt.NDArray[Any]) -> FloatArray:
    # A number beyond the range of float32 becomes infinite, and is reported like other non-finite numbers.
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _find_lossy(values: npt.NDArray[Any]) -> set[int]:
    """Return the indices of the columns of `values` [n, width] whose variation is mostly lost in float32."""
    if not len(values) or values.dtype.itemsize < 4 or values.dtype.kind not in "iuf":
        return set()
    exact = values.astype(np.float64)
    if not np.isfinite(exact).all():
        return set()
    value_range, step = np.ptp(exact, axis=0), np.spacing(_to_float32(np.abs(exact).max(axis=0)))
    return set(np.flatnonzero((value_range > 0) & (step > _RESOLUTION * value_range)).tolist())
