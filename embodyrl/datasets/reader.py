"""Reads a whole data set into memory: frames decoded once, so that a batch is one gather."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.datasets import layout
from embodyrl.datasets.check import check_layout
from embodyrl.datasets.frames import decode_mp4, decode_png
from embodyrl.datasets.layout import image_key, read_card
from embodyrl.datasets.writer import paths_of, read_episodes
from embodyrl.errors import EmbodyError
from embodyrl.files import available_bytes
from embodyrl.types import ByteArray, FloatArray, IntArray, Observation

_MEMORY_SHARE = 0.8
"""Of the free memory that decoded frames may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """N env steps of E episodes, one after the other."""

    images: ByteArray
    """[N, C, H, W, 3] uint8 in the simulator's orientation."""
    state: FloatArray
    """[N, S]"""
    action: FloatArray
    """[N, A] in the environment's units."""
    start: IntArray
    """[E] first step of each episode."""
    stop: IntArray
    """[E] one past its last step."""
    instruction: npt.NDArray[np.object_]
    """[N] text of each step's episode."""

    @property
    def num_episodes(self) -> int:
        return len(self.start)

    def steps_of(self, episodes: Sequence[int]) -> IntArray:
        """All steps of the given episodes."""
        return np.concatenate([np.arange(self.start[e], self.stop[e]) for e in episodes])

    def chunks(self, steps: IntArray, length: int) -> FloatArray:
        """Return the actions [B, K, A] that follow each step; after an episode's end its last action repeats."""
        stop = self.stop[np.searchsorted(self.stop, steps, side="right")]
        return self.action[np.minimum(steps[:, None] + np.arange(length), stop[:, None] - 1)]

    def observe(self, steps: IntArray) -> Observation:
        """Gather the observations of the given steps."""
        return Observation(
            images=self.images[steps], state=self.state[steps], instructions=tuple(self.instruction[steps])
        )


def load_demonstrations(root: Path) -> Demonstrations:
    """Load all episodes; frames are decoded to uint8 in memory.

    Raises:
        EmbodyError: the folder does not follow the layout, is empty or damaged, or is larger than the free memory.
    """
    card = read_card(root)
    problems = check_layout(root)
    if problems:
        more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise EmbodyError(f"{root} is damaged: {problems[0]}{more} Collect it again, or go on collecting into it.")
    rows = read_episodes(root)
    if not rows:
        raise EmbodyError(f"{root} holds no episodes. Go on collecting into it.")
    count = int(rows[-1]["dataset_to_index"])
    shape = (count, len(card.env.cameras), *card.env.image_size, 3)
    _require_memory(root, int(np.prod(shape)))
    images = np.empty(shape, np.uint8)
    tables: list[pa.Table] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for paths, group in groupby(rows, key=lambda row: paths_of(card, row)):
            part = list(group)
            out = images[part[0]["dataset_from_index"] : part[-1]["dataset_to_index"]]
            table = pq.read_table(root / paths[0])
            for c, camera in enumerate(card.env.cameras):
                if card.video:
                    decode_mp4(root / paths[1 + c], out[:, c])
                else:
                    list(pool.map(decode_png, _image_bytes(table[image_key(camera)]), out[:, c]))
            tables.append(table.drop_columns([k for k in map(image_key, card.env.cameras) if k in table.column_names]))
    numbers = pa.concat_tables(tables)
    return Demonstrations(
        images=images,
        state=_matrix(numbers, layout.STATE, card.env.state_dim),
        action=_matrix(numbers, layout.ACTION, card.env.action_dim),
        start=np.array([row["dataset_from_index"] for row in rows], np.int64),
        stop=np.array([row["dataset_to_index"] for row in rows], np.int64),
        instruction=np.repeat(np.array([row["tasks"][0] for row in rows], object), [row["length"] for row in rows]),
    )


def _image_bytes(column: Any) -> Iterator[bytes]:
    for chunk in column.chunks:
        yield from (value.as_py() for value in chunk.field("bytes"))


def _matrix(table: pa.Table, key: str, width: int) -> FloatArray:
    if width == 0:
        return np.zeros((table.num_rows, 0), np.float32)
    column = table[key].combine_chunks()
    flat = column if width == 1 else column.flatten()
    return flat.to_numpy(zero_copy_only=False).reshape(table.num_rows, width)


def _require_memory(root: Path, needed: int) -> None:
    free = available_bytes()
    if needed > _MEMORY_SHARE * free:
        raise EmbodyError(
            f"{root}: decoded frames need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of memory are free. "
            "Collect with smaller cameras (env.init_params) or fewer episodes."
        )
