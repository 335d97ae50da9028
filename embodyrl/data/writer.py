"""Writer that saves demonstrations in batches: saved batches survive a crash, and the collection can resume."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.config.compose import flatten
from embodyrl.data import layout
from embodyrl.data.cards import read_card
from embodyrl.data.frames import encode_mp4, encode_png
from embodyrl.data.layout import Card, Demonstration, image_key
from embodyrl.data.rows import find_rows, read_vectors
from embodyrl.data.statistics import compute_image_stats, compute_vector_stats, count_pixels
from embodyrl.data.tables import get_data_path, get_video_path, read_episodes
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.files import SCRATCH
from embodyrl.types import FloatArray, IntArray

FLUSH_EPISODES = 20
FLUSH_BYTES = 512 * 2**20
"""Size of raw frames in bytes at which a batch is written; a crash loses at most one batch."""
_NUM_ENCODER_THREADS = 2
_HISTOGRAM_PREFIX = f"{layout.OWN}pixels/"
"""Prefix of the columns with pixel histograms in meta/episodes; the histograms give quantiles over all frames."""


@dataclass(frozen=True, slots=True)
class _PendingEpisode:
    demonstration: Demonstration
    images: dict[str, list[bytes]]
    pixels: dict[str, IntArray]
    """Pixel histograms [3, 256] of the episode (see `count_pixels`), by camera feature."""


class DatasetWriter:
    """Writer that appends demonstrations to a data set; background threads encode the frames."""

    def __init__(self, root: Path, card: Card) -> None:
        """Create a data set, or open a data set to append to.

        Raises:
            EmbodyError: the folder contains other files, or a camera name cannot be a folder name.
            ConfigError: the folder contains a data set with other settings.
        """
        # Names may come from an untrusted data set, and become folders.
        if names := [name for name in card.env.cameras.names if "/" in name or "\0" in name]:
            raise EmbodyError(
                f"The camera {names[0]!r} cannot be written to {root}, because its name contains '/' or a zero byte. "
                "Rename the camera with data.cameras, or in the metadata of the source."
            )
        self.root = root
        self.card = card
        self._open_or_create()
        self._episodes = read_episodes(root)
        self._tasks = list(dict.fromkeys(task for row in self._episodes for task in row["tasks"]))
        self._values_by_key: dict[str, list[FloatArray]] = {}
        self._pixels = {image_key(camera): np.zeros((3, 256), np.int64) for camera in card.env.cameras.names}
        """Pixel histograms of all episodes on disk (see `count_pixels`), by camera feature."""
        if self._episodes:
            self._read_existing()
        self._episodes = [_remove_statistics(row) for row in self._episodes]
        places = ((row["data/chunk_index"], row["data/file_index"]) for row in self._episodes)
        self._files = 1 + max((chunk * layout.CHUNKS_SIZE + file for chunk, file in places), default=-1)
        self._batch: list[Future[_PendingEpisode]] = []
        self._batch_bytes = 0
        self._pool = ThreadPoolExecutor(_NUM_ENCODER_THREADS, thread_name_prefix="encoder")
        self._drop_orphans()
        self._write_summary()

    @property
    def episodes(self) -> Sequence[dict[str, Any]]:
        """Rows of meta/episodes on disk, without statistics."""
        return self._episodes

    @property
    def num_frames(self) -> int:
        """Number of env steps of all episodes on disk."""
        return int(self._episodes[-1]["dataset_to_index"]) if self._episodes else 0

    def append(self, demonstration: Demonstration) -> None:
        """Add an episode to the current batch; `flush`, which is called for full batches, writes the batch to disk.

        Raises:
            EmbodyError: a state, action or reward is not finite; the message names the step.
        """
        for name, values in self._get_vectors(demonstration).items():
            invalid = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if len(invalid):
                raise EmbodyError(
                    f"{self.root}: {name} of step {invalid[0]} of '{demonstration.instruction}' "
                    f"(reset id {demonstration.source.reset_id}) is {values[invalid[0]].tolist()}, "
                    "expected finite numbers. Check the environment and the policy."
                )
        self._batch.append(self._pool.submit(self._prepare, demonstration))
        self._batch_bytes += demonstration.images.nbytes
        if len(self._batch) >= FLUSH_EPISODES or self._batch_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all appended episodes: first their files, then their rows of meta/episodes."""
        batch = [future.result() for future in self._batch]
        self._batch, self._batch_bytes = [], 0
        if not batch:
            return
        file_indices = layout.get_file_indices(self._files)
        names = [item.demonstration.instruction for item in batch]
        self._tasks = list(dict.fromkeys([*self._tasks, *names]))
        rows, tables, start = [], [], self.num_frames
        elapsed = 0.0
        for offset, pending in enumerate(batch):
            index = len(self._episodes) + offset
            tables.append(self._build_table(pending, index, start))
            rows.append(self._build_episode_row(pending, index, start, file_indices, elapsed))
            start += len(pending.demonstration)
            elapsed += len(pending.demonstration) / self.card.fps
        if self.card.video:
            self._write_videos([item.demonstration for item in batch], file_indices)
        self._write_parquet(layout.DATA_PATH.format(**file_indices), *tables)
        self._write_parquet(layout.EPISODES_PATH.format(**file_indices), _build_episodes_table(rows))
        self._files += 1
        self._episodes += map(_remove_statistics, rows)
        for pending in batch:
            for name, values in self._get_vectors(pending.demonstration).items():
                self._values_by_key.setdefault(name, []).append(values)
        self._add_histograms(rows)
        self._write_summary()

    def close(self) -> None:
        """Stop the encoders, and drop episodes that were not flushed; idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._batch, self._batch_bytes = [], 0

    # --- files ------------------------------------------------------------------------------------------------------

    def _open_or_create(self) -> None:
        path = self.root / layout.CARD_PATH
        if path.is_file():
            _require_same_settings(path, self.card)
            return
        # A process that was killed before it wrote the card leaves a scratch file.
        if any(entry.is_file() and not entry.name.startswith(SCRATCH) for entry in self.root.rglob("*")):
            raise EmbodyError(
                f"{self.root} is not empty and contains no data set of embodyrl ({layout.CARD_PATH} is missing). "
                "Choose another folder."
            )
        layout.write_file(path, self.card.to_json().encode())

    def _drop_orphans(self) -> None:
        """Delete files of a crashed process: temporary files, and files that no row of meta/episodes refers to."""
        referenced = {self.root / path for row in self._episodes for path in get_episode_paths(self.card, row)}
        for folder in ("data", "videos", "meta"):
            for path in sorted((self.root / folder).rglob("*")):
                is_orphan = folder != "meta" and path not in referenced
                if (path.is_file() or path.is_symlink()) and (is_orphan or path.name.startswith(SCRATCH)):
                    path.unlink()

    def _write_parquet(self, name: str, *groups: pa.Table) -> None:
        """Write tables of one schema as the row groups of one file."""
        buffer = BytesIO()
        with pq.ParquetWriter(buffer, groups[0].schema, compression="snappy") as file:
            for group in groups:
                file.write_table(group)
        layout.write_file(self.root / name, buffer.getvalue())

    def _write_videos(self, batch: Sequence[Demonstration], file_indices: dict[str, int]) -> None:
        for index, camera in enumerate(self.card.env.cameras.names):
            path = self.root / layout.VIDEO_PATH.format(video_key=image_key(camera), **file_indices)
            path.parent.mkdir(parents=True, exist_ok=True)
            encode_mp4([demonstration.images[:, index] for demonstration in batch], self.card.fps, path)

    def _write_summary(self) -> None:
        """Write meta/info.json, stats.json and tasks.parquet, which are derived from meta/episodes."""
        self._write_parquet(layout.TASKS_PATH, layout.build_tasks_table(self._tasks))
        info = layout.build_info(
            self.card, episodes=len(self._episodes), frames=self.num_frames, tasks=len(self._tasks)
        )
        layout.write_file(self.root / layout.INFO_PATH, (json.dumps(info, indent=4) + "\n").encode())
        pixels = self._pixels if self._episodes else {}
        parts = {key: compute_image_stats(counts, self.num_frames) for key, counts in pixels.items()}
        # Computed over all frames: quantiles of episodes cannot be combined.
        parts |= {key: compute_vector_stats(np.concatenate(values)) for key, values in self._values_by_key.items()}
        stats = {key: {name: value.tolist() for name, value in part.items()} for key, part in parts.items()}
        layout.write_file(self.root / layout.STATS_PATH, (json.dumps(stats, indent=4, allow_nan=False) + "\n").encode())

    def _read_existing(self) -> None:
        """Read the numeric columns and the pixel histograms of the episodes on disk."""
        rows = find_rows(self.root, self._episodes)
        widths = {layout.STATE: self.card.env.state_dim, layout.ACTION: self.card.env.action.dim}
        widths |= {} if layout.REWARD in self.card.without else {layout.REWARD: 1}
        self._values_by_key = {name: [read_vectors(rows, name, width)] for name, width in widths.items() if width}
        self._add_histograms(self._episodes)
        pixels = self.num_frames * math.prod(self.card.env.cameras.size)
        if any((counts.sum(axis=1) != pixels).any() for counts in self._pixels.values()):
            raise EmbodyError(
                f"{self.root} was collected by an older version, whose image statistics cannot be extended. "
                "Choose another collect.out, and combine both data sets with data.more in `embodyrl sft`."
            )

    def _add_histograms(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the pixel histograms of episodes to the totals; older data sets may lack these columns."""
        for key, counts in self._pixels.items():
            for row in rows:
                counts += np.asarray(row.get(f"{_HISTOGRAM_PREFIX}{key}", np.zeros(768)), np.int64).reshape(3, 256)

    def _get_vectors(self, demonstration: Demonstration) -> dict[str, FloatArray]:
        demo = demonstration
        state = {layout.STATE: demo.state} if self.card.env.state_dim else {}
        reward = {} if layout.REWARD in self.card.without else {layout.REWARD: demo.reward.reshape(-1, 1)}
        return {**state, layout.ACTION: demo.action, **reward}

    # --- contents ---------------------------------------------------------------------------------------------------

    def _prepare(self, demonstration: Demonstration) -> _PendingEpisode:
        demo = demonstration
        images: dict[str, list[bytes]] = {}
        pixels: dict[str, IntArray] = {}
        for index, camera in enumerate(self.card.env.cameras.names):
            key = image_key(camera)
            if not self.card.video:
                images[key] = [encode_png(frame) for frame in demo.images[:, index]]
            pixels[key] = count_pixels(demo.images[:, index])
        # Encoded frames are small; the raw frames of a whole batch are not.
        return _PendingEpisode(demo if self.card.video else replace(demo, images=demo.images[:0]), images, pixels)

    def _build_table(self, pending: _PendingEpisode, index: int, start: int) -> pa.Table:
        demo, schema = pending.demonstration, layout.build_schema(self.card)
        steps = np.arange(len(demo))
        done = steps == len(demo) - 1
        values: dict[str, Any] = {
            layout.STATE: demo.state,
            layout.ACTION: demo.action,
            layout.REWARD: demo.reward,
            layout.DONE: done,
            layout.SUCCESS: np.zeros(len(demo), np.bool_) if demo.success is None else demo.success,
            "timestamp": (steps / self.card.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(len(demo), index),
            "index": start + steps,
            "task_index": np.full(len(demo), self._tasks.index(demo.instruction)),
            layout.ACTOR: np.broadcast_to(np.asarray(demo.actor, np.int64), len(demo)),
        }
        columns = []
        for field in schema:
            if field.name in pending.images:
                rows = [{"bytes": png, "path": None} for png in pending.images[field.name]]
                columns.append(pa.array(rows, field.type))
            elif pa.types.is_fixed_size_list(field.type):
                # Built from one flat array: otherwise Arrow makes a Python list of every row.
                flat = pa.array(np.ascontiguousarray(values[field.name]).reshape(-1), field.type.value_type)
                columns.append(pa.FixedSizeListArray.from_arrays(flat, field.type.list_size))
            else:
                columns.append(pa.array(np.asarray(values[field.name]).reshape(len(demo)), field.type))
        return pa.Table.from_arrays(columns, schema=schema)

    def _build_episode_row(
        self, pending: _PendingEpisode, index: int, start: int, file_indices: dict[str, int], elapsed: float
    ) -> dict[str, Any]:
        demo = pending.demonstration
        row: dict[str, Any] = {"episode_index": index, "tasks": [demo.instruction], "length": len(demo)}
        # Readers of the layout find an episode by these columns, without opening the data.
        row |= {f"data/{name}": value for name, value in file_indices.items()}
        row |= {"dataset_from_index": start, "dataset_to_index": start + len(demo)}
        for camera in self.card.env.cameras.names if self.card.video else ():
            prefix = f"videos/{image_key(camera)}"
            row |= {f"{prefix}/{name}": value for name, value in file_indices.items()}
            row[f"{prefix}/from_timestamp"] = elapsed
            row[f"{prefix}/to_timestamp"] = elapsed + len(demo) / self.card.fps
        row |= {f"meta/episodes/{name}": value for name, value in file_indices.items()}
        parts = {key: compute_image_stats(counts, len(demo)) for key, counts in pending.pixels.items()}
        parts |= {key: compute_vector_stats(values) for key, values in self._get_vectors(demo).items()}
        for key, stats in parts.items():
            row |= {f"stats/{key}/{name}": value.tolist() for name, value in stats.items()}
        row |= {f"{_HISTOGRAM_PREFIX}{key}": counts.ravel().tolist() for key, counts in pending.pixels.items()}
        row |= {f"{layout.OWN}{name}": value for name, value in asdict(demo.source).items()}
        if layout.SUCCESS not in self.card.without:
            row[f"{layout.OWN}success"] = None if demo.success is None else bool(demo.success.any())
        if layout.REWARD not in self.card.without:
            row[f"{layout.OWN}return"] = float(demo.reward.sum())
        return row


def _build_episodes_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows of meta/episodes as a table; columns without values, for example unknown success, have type bool."""
    table = pa.Table.from_pylist(rows)
    fields = [pa.field(column.name, pa.bool_()) if pa.types.is_null(column.type) else column for column in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def get_episode_paths(card: Card, row: dict[str, Any]) -> list[str]:
    """Return the paths of the data and video files of an episode, relative to the data set."""
    cameras = card.env.cameras.names if card.video else ()
    return [get_data_path(row), *(get_video_path(row, image_key(camera)) for camera in cameras)]


def _remove_statistics(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of meta/episodes without its statistics, which are large."""
    return {name: value for name, value in row.items() if not name.startswith((_HISTOGRAM_PREFIX, "stats/"))}


def _require_same_settings(path: Path, card: Card) -> None:
    stored = read_card(path.parents[1])
    expected, actual = (
        {key: value for key, value in flatten(json.loads(current.to_json())).items() if value != {}}
        for current in (card, stored)
    )
    for name in sorted({*expected, *actual}):
        # A conversion adds the tasks at its end; at its start, they are empty.
        is_added_later = name in ("env.tasks", "env.states_per_task") and expected.get(name) == []
        if not is_added_later and expected.get(name) != actual.get(name):
            raise ConfigError(
                f"{path.parents[1]} was collected with other settings: {name} is {actual.get(name)!r} in the data set, "
                f"but {expected.get(name)!r} in this run. Use the same settings to resume, or delete "
                "the folder, or choose another folder."
            )
