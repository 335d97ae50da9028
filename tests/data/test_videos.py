"""Video frames of each step: clocks that differ, frames of discarded takes, and subsets of a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pyarrow.parquet as pq
import pytest
from lerobot_sets import LENGTHS, edit_episodes, frame, write_set, write_v2_set

from embodyrl.cli.main import main
from embodyrl.data.reader import Demonstrations, load_demonstrations
from embodyrl.errors import EmbodyError

pytestmark = pytest.mark.integration

KEYS = tuple(f"videos/observation.images.{camera}/" for camera in ("front", "wrist"))
ORDERS = ((0, 1, 2), (2, 1, 0))
"""Order of the episodes in the file of each camera."""


def encode(root: Path, fps: float, change: Callable[[list[Any]], list[Any]] = list) -> None:
    """Encode the videos of both cameras again, with another rate and other frames."""
    for camera, order in enumerate(ORDERS):
        frames = change([frame(e, t, camera) for e in order for t in range(LENGTHS[e])])
        options: dict[str, Any] = {"codec": "libx264", "macro_block_size": 2, "output_params": ["-crf", "5", "-g", "2"]}
        iio.imwrite(
            root / KEYS[camera] / "chunk-000/file-000.mp4", np.stack(frames), plugin="FFMPEG", fps=fps, **options
        )


def wrong_frames(demos: Demonstrations, episodes: tuple[int, ...] = (0, 1, 2)) -> int:
    expected = [[frame(e, t, camera) for camera in (0, 1)] for e in episodes for t in range(LENGTHS[e])]
    return int((np.abs(demos.images.astype(int) - np.array(expected)).max((1, 2, 3, 4)) > 6).sum())


@pytest.mark.parametrize("fps", [9.0, 9.8, 9.99, 10.2, 5.0, 15.0])
def test_videos_with_one_frame_per_step_are_read_in_order(tmp_path: Path, fps: float) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    encode(root, fps)
    demos = load_demonstrations(root)
    assert (wrong_frames(demos), demos.warnings) == (0, ())


@pytest.mark.parametrize("rate", [0.97, 1.02])
def test_timestamps_of_table_and_video_may_have_different_scales(tmp_path: Path, rate: float) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    names = [f"{key}{edge}_timestamp" for key in KEYS for edge in ("from", "to")]
    edit_episodes(root, lambda rows: [row.update({name: row[name] * rate for name in names}) for row in rows])
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("timestamp")
    times = table["timestamp"].to_numpy() * rate
    pq.write_table(table.set_column(place, "timestamp", [times.astype(np.float32)]), path)
    assert wrong_frames(load_demonstrations(root)) == 0


def test_unused_video_frames_warn_and_episode_timestamps_skip_them(tmp_path: Path, capsys: Any) -> None:
    """A discarded take of 5 frames follows the first episode of each file."""
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    firsts = iter(LENGTHS[order[0]] for order in ORDERS)
    encode(root, 10, lambda frames: frames[: (n := next(firsts))] + [frames[0]] * 5 + frames[n:])
    demos = load_demonstrations(root)
    assert wrong_frames(demos)
    assert "front/chunk-000/file-000.mp4 has 26 frames, but its episodes use 21" in demos.warnings[0]
    assert len(demos.warnings) == 2
    assert main(["data", "merge", str(tmp_path / "merged"), str(root), str(root)]) == 0
    assert "warning " + demos.warnings[0] in " ".join(capsys.readouterr().out.split())

    def shift(rows: list[dict[str, Any]]) -> None:
        for key, order in zip(KEYS, ORDERS, strict=True):
            for row in (rows[episode] for episode in order[1:]):
                row.update({f"{key}{edge}_timestamp": row[f"{key}{edge}_timestamp"] + 0.5 for edge in ("from", "to")})

    edit_episodes(root, shift)
    assert wrong_frames(load_demonstrations(root)) == 0


def test_video_frames_at_other_times_than_the_steps_are_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    encode(root, 9.7, lambda frames: frames + frames[-3:])
    with pytest.raises(EmbodyError, match=r"24 frames, which is not the number of steps, and step \d of episode 2 at"):
        load_demonstrations(root)


def test_missing_video_frames_in_a_gap_of_the_timestamps_are_an_error(tmp_path: Path) -> None:
    """The file has as many frames as there are steps, but the table says that they are not consecutive."""
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    names = [f"{KEYS[0]}{edge}_timestamp" for edge in ("from", "to")]
    edit_episodes(root, lambda rows: rows[2].update({name: rows[2][name] + 0.5 for name in names}))
    with pytest.raises(EmbodyError, match="contains 21 frames, but the data set declares 26"):
        load_demonstrations(root)


@pytest.mark.parametrize("write", [write_set, write_v2_set])
@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize("fps", [10, 9.8])
def test_subset_contains_the_frames_of_its_own_episodes(tmp_path: Path, write: Any, video: bool, fps: float) -> None:
    options = {"video": video} if write is write_v2_set else {"video_files": (0, 0, 0) if video else None}
    root = write(tmp_path / "set", **options)
    if video and write is write_set:
        encode(root, fps)
    for only in ((1,), (2,), (0, 2)):
        demos = load_demonstrations(root, only=only)
        assert wrong_frames(demos, only) == 0
        assert demos.stop.tolist() == np.cumsum([LENGTHS[e] for e in only]).tolist()
