"""File of RECAP's frame labels: return, value, advantage and positive label of each frame of the data sets."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.data.layout import write_file
from embodyrl.data.reader import Demonstrations
from embodyrl.errors import ConfigError, format_reason
from embodyrl.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels of all N frames of the data sets of a run, in the order of the data sets."""

    episode: IntArray
    """[N] index of the episode, from 0 over all data sets."""
    frame: IntArray
    """[N] index of the env step within the episode."""
    returns: FloatArray
    """[N] normalised return-to-go, in -1..0."""
    value: FloatArray
    """[N] predicted values. With several folds, the value model was not trained on the frame's episode."""
    advantage: FloatArray
    positive: BoolArray

    def save(self, path: Path) -> None:
        """Write the labels to a parquet file."""
        columns = {
            "episode_index": self.episode,
            "frame_index": self.frame,
            "recap.return": self.returns,
            "recap.value": self.value,
            "recap.advantage": self.advantage,
            "recap.indicator": self.positive.astype(np.int64),
        }
        buffer = BytesIO()
        pq.write_table(pa.table(columns), buffer)
        write_file(path, buffer.getvalue())


def get_frame_indices(demos: Demonstrations) -> tuple[IntArray, IntArray]:
    """Return the episode index [N] of each frame, and the index [N] of the env step within the episode."""
    length = demos.stop - demos.start
    return np.repeat(np.arange(len(length)), length), np.arange(int(length.sum())) - np.repeat(demos.start, length)


def read_positive(path: Path, demos: Demonstrations) -> IntArray:
    """Return the advantage label [N] of all frames: 1 for positive, 0 for negative.

    Raises:
        ConfigError: the file is missing or damaged, or was written for other data.
    """
    try:
        table = pq.read_table(path)
        columns = [table[name].to_numpy() for name in ("episode_index", "frame_index", "recap.indicator")]
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ConfigError(
            f"objective.labels={path} cannot be read: {format_reason(error)}. Write the file with `embodyrl recap`."
        ) from error
    if any(
        not np.array_equal(stored, expected)
        for stored, expected in zip(columns, get_frame_indices(demos), strict=False)
    ):
        raise ConfigError(
            f"objective.labels={path} has {len(columns[0])} labelled frames, which do not match the "
            f"{len(demos.action)} frames of data.path and data.more. Use the data sets in the order in which "
            f"they were labelled."
        )
    return columns[2].astype(np.int64)
