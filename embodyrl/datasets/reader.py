"""Checks a data set and reads it into memory: frames decoded once, so that a batch is one gather."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.datasets import layout
from embodyrl.datasets.frames import decode_mp4, decode_png
from embodyrl.datasets.layout import Card, image_key, read_card
from embodyrl.datasets.writer import paths_of, read_episodes
from embodyrl.errors import EmbodyError
from embodyrl.files import available_bytes, available_cores
from embodyrl.types import BoolArray, ByteArray, FloatArray, IntArray

_COUNTERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_TOLERANCE_S = 1e-4
"""Largest deviation of a time stamp from frame_index / fps that readers of this layout accept."""

_Rows = list[dict[str, Any]]


_MEMORY_SHARE = 0.8
"""Of the free memory that decoded frames may take."""


def check_layout(root: Path) -> list[str]:
    """Return what is wrong with a data set, one line each; of one that others wrote, what would be misread here."""
    problems: list[str] = []
    try:
        card, rows = layout.read_card(root), read_episodes(root)
    except EmbodyError as error:
        return [f"{root} cannot be read: {error}"]
    for part in (_info, _tasks, _stats, _episodes) if layout.is_ours(root) else (_episodes,):
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
            # Of images one number a channel, shaped so that it broadcasts over [3, H, W].
            shape = (1,) if name == "count" else (3, 1, 1) if image else tuple(feature["shape"])
            if np.shape(values) != shape:
                yield f"{layout.STATS_PATH}: {key}/{name} has shape {np.shape(values)}, expected {shape}."


def _episodes(root: Path, card: Card, rows: _Rows) -> Iterator[str]:
    opened: dict[str, pa.Table] = {}
    named: set[str] = set()
    ours, start = layout.is_ours(root), 0
    names = _task_names(rows) if ours else list(card.env.tasks)
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
            if ours and not pq.read_schema(root / paths[0]).equals(layout.schema_of(card)):
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
    # A file holds the episodes of a whole batch.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """N env steps of E episodes, one after the other."""

    images: ByteArray
    """[N, C, H, W, 3] uint8 in the simulator's orientation."""
    state: FloatArray
    """[N, S]"""
    action: FloatArray
    """[N, A] in the environment's units."""
    reward: FloatArray
    """[N], 0 where another program wrote the data."""
    success: BoolArray
    """[N] the goal held after the action; likewise."""
    start: IntArray
    """[E] first step of each episode."""
    stop: IntArray
    """[E] one past its last step."""
    instruction: npt.NDArray[np.object_]
    """[N] text of each step's episode."""
    reset_id: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[E] initial state of each episode, -1 where another program wrote the data; empty for text."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.start)

    @property
    def shown(self) -> BoolArray:
        """[N] the goal holds in what is seen: after the action before, at the first step never."""
        # A frame shows what the action before it has done; the first one shows nothing yet.
        shown = np.roll(self.success, 1)
        shown[self.start] = False
        return shown

    def steps_of(self, episodes: Sequence[int]) -> IntArray:
        """All steps of the given episodes."""
        return np.concatenate([np.arange(self.start[e], self.stop[e]) for e in episodes])

    def chunks(self, steps: IntArray, length: int) -> FloatArray:
        """Return the actions [B, K, A] that follow each step; after an episode's end its last action repeats."""
        # Chunks that reach beyond the end of their episode repeat its last action.
        stop = self.stop[np.searchsorted(self.stop, steps, side="right")]
        return self.action[np.minimum(steps[:, None] + np.arange(length), stop[:, None] - 1)]

    def ranked(self, episodes: Sequence[int], length: int) -> IntArray:
        """Steps [M, 2] where chunks of an episode begin, and those of a worse one from the same initial state.

        Better is what succeeds, else what earns more; chunk by chunk, as far as both go.
        """
        worth = {e: (bool(self.success[s].any()), float(self.reward[s].sum())) for e, s in self._slices(episodes)}
        pairs = [
            np.stack([self.start[e] + at, self.start[other] + at], axis=1)
            for e in episodes
            for other in episodes
            if self.reset_id[e] == self.reset_id[other] >= 0 and worth[e] > worth[other]
            for at in [np.arange(0, min(self.stop[i] - self.start[i] for i in (e, other)), length)]
        ]
        return np.concatenate([np.zeros((0, 2), np.int64), *pairs])

    def _slices(self, episodes: Sequence[int]) -> list[tuple[int, slice]]:
        return [(e, slice(self.start[e], self.stop[e])) for e in episodes]


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
    # Decoded into their place: a list of frames that is stacked later takes the memory twice.
    images = np.empty(shape, np.uint8)
    tables: list[pa.Table] = []
    with ThreadPoolExecutor(available_cores()) as pool:
        for path, part in _files(card, rows, 0):
            table = pq.read_table(root / path)
            for c, camera in enumerate(() if card.video else card.env.cameras):
                list(pool.map(decode_png, _image_bytes(table[image_key(camera)]), images[part, c]))
            # Their PNG bytes are not needed any more, and would stay until all tables are joined.
            tables.append(table.drop_columns([k for k in map(image_key, card.env.cameras) if k in table.column_names]))
    for c in range(len(card.env.cameras) if card.video else 0):
        for path, part in _files(card, rows, 1 + c):
            decode_mp4(root / path, images[part, c])
    numbers, ours = pa.concat_tables(tables), layout.is_ours(root)
    return Demonstrations(
        images=images,
        state=_matrix(numbers, layout.STATE, card.env.state_dim),
        action=_matrix(numbers, layout.ACTION, card.env.action_dim),
        reward=numbers[layout.REWARD].to_numpy() if ours else np.zeros(count, np.float32),
        success=numbers[layout.SUCCESS].to_numpy() if ours else np.zeros(count, np.bool_),
        start=np.array([row["dataset_from_index"] for row in rows], np.int64),
        stop=np.array([row["dataset_to_index"] for row in rows], np.int64),
        instruction=np.repeat(np.array([row["tasks"][0] for row in rows], object), [row["length"] for row in rows]),
        reset_id=np.array([row.get(f"{layout.OWN}reset_id", -1) for row in rows], np.int64),
    )


def _files(card: Card, rows: _Rows, which: int) -> Iterator[tuple[str, slice]]:
    """Each file of one kind (the data, or a camera) with its steps; kinds change files at different episodes."""
    for path, group in groupby(rows, key=lambda row: paths_of(card, row)[which]):
        part = list(group)
        yield path, slice(part[0]["dataset_from_index"], part[-1]["dataset_to_index"])


def join_demonstrations(parts: Sequence[Demonstrations]) -> Demonstrations:
    """One set of several of the same environment, one after the other."""
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(len(part.images) for part in parts[:-1])])
    moved = [
        replace(part, start=part.start + offset, stop=part.stop + offset)
        for part, offset in zip(parts, offsets, strict=True)
    ]
    names = [part.name for part in fields(Demonstrations)]
    return Demonstrations(**{name: np.concatenate([getattr(part, name) for part in moved]) for name in names})


def _image_bytes(column: Any) -> Iterator[bytes]:
    for chunk in column.chunks:
        yield from (value.as_py() for value in chunk.field("bytes"))


def _matrix(table: pa.Table, key: str, width: int) -> FloatArray:
    if width == 0:
        return np.zeros((table.num_rows, 0), np.float32)
    column = table[key].combine_chunks()
    # Vectors of one number are plain columns in this layout.
    flat = column if width == 1 else column.flatten()
    return flat.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(table.num_rows, width)


def _require_memory(root: Path, needed: int) -> None:
    free = available_bytes()
    if needed > _MEMORY_SHARE * free:
        raise EmbodyError(
            f"{root}: decoded frames need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of memory are free. "
            "Collect with smaller cameras (env.init_params) or fewer episodes."
        )
