"""Write small LeRobot v3.0 datasets of other programs, each with one unusual property."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodyrl.data.layout import build_tasks_table

LENGTHS = (6, 7, 8)
_COUNTERS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


def frame(episode: int, step: int, camera: int, size: int = 32) -> np.ndarray:
    """Return a frame whose colors encode episode, step and camera."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[...] = 40 * episode + 10, 12 * step + 5, 60 * camera + 20
    return pixels


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def numbers(width: int = 3) -> Callable[[int, int], list[float]]:
    rng = np.random.default_rng(0)
    table = rng.uniform(-1, 1, (len(LENGTHS), max(LENGTHS), width)).astype(np.float32)
    return lambda episode, step: table[episode, step].tolist()


def write_set(
    root: Path,
    *,
    cameras: Sequence[str] = ("observation.images.front", "observation.images.wrist"),
    video_files: Sequence[int] | None = None,
    shape: Sequence[int] = (32, 32, 3),
    names: Sequence[str] | None = ("height", "width", "channels"),
    fps: float = 10,
    tasks: Sequence[str] = ("touch the red block",),
    task_of: Callable[[int, int], int] = lambda episode, step: 0,
    columns: Mapping[str, Callable[[int, int], list[float]]] | None = None,
    data_files: Sequence[int] = (0, 0, 0),
    info: Mapping[str, Any] | None = None,
) -> Path:
    """Write three episodes; `columns`: vectors by name, `video_files`: video file of each episode."""
    columns = columns or {"observation.state": numbers(4), "action": numbers(3)}
    kind = "image" if video_files is None else "video"
    features: dict[str, Any] = {c: {"dtype": kind, "shape": [*shape], "names": names} for c in cameras}
    for name, values in columns.items():
        features[name] = {"dtype": "float32", "shape": [len(values(0, 0))], "names": None}
    features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _COUNTERS.items()}
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    described = {"codebase_version": "v3.0", "robot_type": "arm", "total_episodes": 3, "total_frames": sum(LENGTHS)}
    described |= {"fps": fps, "features": features, **(info or {})}
    (root / "meta/info.json").write_text(json.dumps(described))
    pq.write_table(build_tasks_table(list(tasks)), root / "meta/tasks.parquet")
    _write_rows(root, cameras if kind == "image" else (), fps, task_of, columns, data_files)
    starts = np.cumsum([0, *LENGTHS])
    table = []
    for episode, length in enumerate(LENGTHS):
        told = list(dict.fromkeys(tasks[task_of(episode, step)] for step in range(length)))
        row = {"episode_index": episode, "tasks": told, "length": length, "data/chunk_index": 0}
        row |= {"data/file_index": data_files[episode], "dataset_from_index": int(starts[episode])}
        table.append(row | {"dataset_to_index": int(starts[episode + 1])})
    if video_files is not None:
        _write_videos(root, cameras, fps, video_files, table)
    pq.write_table(pa.Table.from_pylist(table), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


def write_v2_set(root: Path, *, video: bool = False, chunks_size: int = 2, **options: Any) -> Path:
    """Write the three episodes in the layout of lerobot before 0.4: each episode has its own files."""
    write_set(root, video_files=(0, 1, 2) if video else None, data_files=(0, 1, 2), **options)
    info = json.loads((root / "meta/info.json").read_text())
    place = "chunk-{episode_chunk:03d}"
    info |= {"codebase_version": "v2.1", "chunks_size": chunks_size, "total_videos": 6 * video}
    info |= {"data_path": f"data/{place}/episode_{{episode_index:06d}}.parquet"}
    info |= {"video_path": f"videos/{place}/{{video_key}}/episode_{{episode_index:06d}}.mp4" if video else None}
    (root / "meta/info.json").write_text(json.dumps(info))
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    keys = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    stats = []
    for row in rows:
        number = row["episode_index"]
        named = {"episode_chunk": number // chunks_size, "episode_index": number}
        moved = {f"data/chunk-000/file-{number:03d}.parquet": info["data_path"].format(**named)}
        for key in keys:
            moved[f"videos/{key}/chunk-000/file-{number:03d}.mp4"] = info["video_path"].format(video_key=key, **named)
        for old, new in moved.items():
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            (root / old).rename(root / new)
        stats.append({"episode_index": number, "stats": {"action": {"count": [row["length"]]}}})
    tasks = pq.read_table(root / "meta/tasks.parquet").to_pylist()
    write_lines(root / "meta/tasks.jsonl", tasks)
    write_lines(
        root / "meta/episodes.jsonl", [{k: row[k] for k in ("episode_index", "tasks", "length")} for row in rows]
    )
    write_lines(root / "meta/episodes_stats.jsonl", stats)
    (root / "meta/tasks.parquet").unlink()
    shutil.rmtree(root / "meta/episodes")
    return root


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_episodes(root: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)


def _write_rows(
    root: Path,
    cameras: Sequence[str],
    fps: float,
    task_of: Callable[[int, int], int],
    columns: Mapping[str, Callable[[int, int], list[float]]],
    data_files: Sequence[int],
) -> None:
    rows: dict[int, list[dict[str, Any]]] = {}
    total = 0
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            row: dict[str, Any] = {name: values(episode, step) for name, values in columns.items()}
            row |= {"timestamp": step / fps, "frame_index": step, "episode_index": episode, "index": total}
            row["task_index"] = task_of(episode, step)
            row |= {c: {"bytes": png(frame(episode, step, i)), "path": None} for i, c in enumerate(cameras)}
            rows.setdefault(data_files[episode], []).append(row)
            total += 1
    for number, part in rows.items():
        kinds = {name: pa.list_(pa.float32()) for name in columns} | {"timestamp": pa.float32()}
        kinds |= {c: pa.struct([("bytes", pa.binary()), ("path", pa.string())]) for c in cameras}
        arrays = {name: pa.array([row[name] for row in part], kinds.get(name, pa.int64())) for name in part[0]}
        pq.write_table(pa.table(arrays), root / f"data/chunk-000/file-{number:03d}.parquet")


def _write_videos(
    root: Path, cameras: Sequence[str], fps: float, files: Sequence[int], table: list[dict[str, Any]]
) -> None:
    """Write the episodes of each file; the second camera has them in reverse order."""
    for i, camera in enumerate(cameras):
        folder = root / f"videos/{camera}/chunk-000"
        folder.mkdir(parents=True)
        for number in sorted(set(files)):
            frames, inside = [], [e for e in range(len(LENGTHS)) if files[e] == number]
            for episode in inside[::-1] if i else inside:
                begin = len(frames) / fps
                frames += [frame(episode, step, i) for step in range(LENGTHS[episode])]
                row = {"chunk_index": 0, "file_index": number, "from_timestamp": begin}
                row["to_timestamp"] = len(frames) / fps
                table[episode] |= {f"videos/{camera}/{name}": value for name, value in row.items()}
            options: dict[str, Any] = {"codec": "libx264", "output_params": ["-crf", "5", "-g", "2"]}
            path = folder / f"file-{number:03d}.mp4"
            iio.imwrite(path, np.stack(frames), plugin="FFMPEG", fps=fps, macro_block_size=2, **options)
