"""LeRobot datasets v2.1: read like v3.0; damaged sets are rejected with the episode and the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from lerobot_sets import LENGTHS, frame, numbers, write_lines, write_set, write_v2_set

from embodyrl.commands.export import dataset_card
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.errors import EmbodyError

STEPS = [(e, t) for e, length in enumerate(LENGTHS) for t in range(length)]
TASKS = ("touch the red block", "open the door")
LAST = "data/chunk-001/episode_000002.parquet"


@pytest.mark.parametrize("video", [False, True])
def test_old_layout_gives_the_same_episodes_as_v3(tmp_path: Path, video: bool) -> None:
    options: dict[str, Any] = {"tasks": TASKS, "task_of": lambda episode, step: episode % 2}
    root = write_v2_set(tmp_path / "old", video=video, **options)
    assert check_layout(root) == []
    old = load_demonstrations(root)
    new = load_demonstrations(write_set(tmp_path / "new", video_files=(0, 1, 2) if video else None, **options))
    for name in ("images", "state", "action", "start", "stop", "instruction", "success", "reset_id"):
        np.testing.assert_array_equal(getattr(old, name), getattr(new, name), err_msg=name)
    np.testing.assert_array_equal(old.action, [numbers(3)(e, t) for e, t in STEPS])
    expected = np.stack([frame(e, t, 1) for e, t in STEPS])
    assert np.abs(old.images[:, 1].astype(int) - expected).max() <= (6 if video else 0)
    assert (read_card(root).env.tasks, read_card(root).env.cameras.names) == (TASKS, ("front", "wrist"))


def test_rows_of_an_old_layout_do_not_depend_on_their_global_index(tmp_path: Path) -> None:
    """Tools that cut or merged such sets left gaps in `index`, which lerobot did not read."""
    root = write_v2_set(tmp_path / "set")
    table = pq.read_table(root / LAST)
    shuffled = table.set_column(table.column_names.index("index"), "index", [[7] * len(table)])
    pq.write_table(shuffled.take(list(range(len(table)))[::-1]), root / LAST)
    np.testing.assert_array_equal(load_demonstrations(root).state, [numbers(4)(e, t) for e, t in STEPS])


def edit_info(root: Path, **changes: Any) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | changes))


def cut(root: Path, name: str) -> None:
    table = pq.read_table(root / name)
    pq.write_table(table.slice(0, len(table) - 1), root / name)


def append(root: Path, name: str, text: str) -> None:
    with (root / name).open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda r: (r / "meta/episodes.jsonl").unlink(), r"episodes.jsonl is missing. Download the data set again"),
        (lambda r: (r / "meta/tasks.jsonl").unlink(), r"tasks.jsonl is missing"),
        (lambda r: append(r, "meta/episodes.jsonl", "{"), r"episodes.jsonl cannot be read: line 4 is not JSON"),
        (
            lambda r: append(r, "meta/episodes.jsonl", "[" * 100_000),
            r"episodes.jsonl cannot be read: line 4 is not JSON",
        ),
        (lambda r: os.truncate(r / "meta/episodes.jsonl", 40 << 30), r"line 4 is longer than 16 MiB"),
        (lambda r: os.truncate(r / "meta/tasks.jsonl", 40 << 30), r"line 2 is longer than 16 MiB"),
        (
            lambda r: append(r, "meta/episodes.jsonl", "[1]\n"),
            r"line 4: the field episode_index is missing, or is not of type int",
        ),
        (
            lambda r: append(r, "meta/tasks.jsonl", '{"task_index": 1}\n'),
            r"tasks.jsonl, line 2: the field task is missing",
        ),
        (lambda r: edit_info(r, total_episodes=4), r"declares 4 episodes, but meta/episodes.jsonl has 3"),
        (lambda r: (r / LAST).unlink(), r"episode_000002.parquet is missing"),
        (lambda r: (r / LAST).write_bytes(b"PAR1"), r"episode_000002.parquet cannot be read"),
        (lambda r: cut(r, LAST), r"episode_000002.parquet has 7 rows, but episode 2 has length 8"),
        (
            lambda r: (r / LAST).write_bytes((r / "data/chunk-000/episode_000001.parquet").read_bytes()),
            r"episode_000002.parquet has 7 rows",
        ),
        (
            lambda r: write_lines(
                r / "meta/episodes.jsonl", [{"episode_index": i, "length": n} for i, n in ((0, 6), (1, 7), (3, 8))]
            ),
            r"episode_000003.parquet",
        ),
        (lambda r: edit_info(r, data_path="../{episode_index}.parquet"), r"'../0.parquet' is outside the folder"),
        (lambda r: edit_info(r, data_path="/tmp/{episode_index}.parquet"), r"'/tmp/0.parquet' is outside the folder"),
        (
            lambda r: edit_info(r, data_path="{episode_index.__class__}"),
            r"'{episode_index.__class__}' is not a valid template",
        ),
        (lambda r: edit_info(r, data_path="{episode_index:>99999999d}"), r"is not a valid template"),
        (lambda r: edit_info(r, data_path="{episode}"), r"is not a valid template \(no field 'episode'\)"),
        (lambda r: edit_info(r, data_path="{episode_index"), r"is not a valid template"),
        (lambda r: edit_info(r, data_path=None), r"has no path template"),
    ],
)
def test_damaged_old_layout_is_rejected(tmp_path: Path, damage: Callable[[Path], Any], error: str) -> None:
    root = write_v2_set(tmp_path / "set")
    damage(root)
    with pytest.raises(EmbodyError, match=error):
        load_demonstrations(root)


def test_missing_video_of_an_old_layout_is_rejected(tmp_path: Path) -> None:
    root = write_v2_set(tmp_path / "set", video=True)
    (root / "videos/chunk-000/observation.images.wrist/episode_000001.mp4").unlink()
    with pytest.raises(EmbodyError, match=r"wrist/episode_000001.mp4 is missing"):
        load_demonstrations(root)
    data = DemonstrationSettings(cameras={"front": "observation.images.front"})
    assert load_demonstrations(root, data).images.shape[:2] == (21, 1)


def test_video_template_of_v3_is_read(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    (root / "videos").rename(root / "movies")
    edit_info(root, video_path="movies/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4")
    assert len(load_demonstrations(root).images) == sum(LENGTHS)
    edit_info(root, video_path="../{video_key}/{chunk_index}/{file_index}.mp4")
    with pytest.raises(EmbodyError, match="is outside the folder"):
        load_demonstrations(root)


def test_uploaded_dataset_of_an_old_layout_is_tagged_with_its_version(tmp_path: Path) -> None:
    uploaded = dataset_card(write_v2_set(tmp_path / "a <b> $c$"), "me/set")
    assert uploaded is not None
    assert uploaded[1] == "v2.1"
    assert "# a &lt;b&gt; &#36;c&#36;\n" in uploaded[0]
