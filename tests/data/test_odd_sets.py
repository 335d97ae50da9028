"""Datasets of other programs with one unusual property: correct values, or an error that names the location."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_sets import LENGTHS, edit_episodes, frame, numbers, write_set, write_v2_set
from PIL import Image

from embodyrl.cli.data import data
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import EmbodyError

FRONT = "observation.images.front"
DATA = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{FRONT}/chunk-000/file-000.mp4"
TOTAL = sum(LENGTHS)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def column(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Replace a column of the data file."""

    def edit(root: Path) -> None:
        table = pq.read_table(root / DATA)
        found = change(table[name].combine_chunks())
        pq.write_table(table.set_column(table.column_names.index(name), name, found), root / DATA)

    return edit


def info(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        path = root / "meta/info.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return edit


def tasks(numbered: list[Any], texts: list[str]) -> Callable[[Path], None]:
    table = pa.table({"task_index": pa.array(numbered, pa.int64()), "task": texts})
    return lambda root: pq.write_table(table, root / "meta/tasks.parquet")


def action(kind: pa.DataType, value: Any) -> Callable[[Path], None]:
    return column("action", lambda old: pa.array([value] * len(old), kind))


def without_image(old: Any) -> Any:
    return pa.array([None if row == 8 else value for row, value in enumerate(old.to_pylist())], IMAGE)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tasks([0, 0], ["touch the red block", "open"]), r"tasks.parquet: task_index 0 has two instructions, 'touch"),
        (tasks([0, None], ["touch the red block", "open"]), r"tasks.parquet: task_index of 'open' is None"),
        (action(pa.list_(pa.string()), ["1"] * 3), r"file-000.parquet: 'action' has the type list<.*: string>"),
        (action(pa.list_(pa.list_(pa.float32())), [[0.5]] * 3), r"file-000.parquet: 'action' has the type list<"),
        (column("task_index", lambda old: old.cast(pa.string())), r"'task_index' has the type string, expected one"),
        (
            column("action", lambda old: pa.array([v[: 2 + (k != 9)] for k, v in enumerate(old.to_pylist())])),
            r"file-000.parquet: episode 1, frame 3: 'action' has 2 numbers, but the data set declares 3",
        ),
        (column(FRONT, without_image), r"episode 1, step 2: 'observation.images.front': there is no image"),
        (info(lambda found: found["features"]["action"].pop("shape")), r"info.json: the shape of 'action' is None"),
        (info(lambda found: found["features"]["action"].update(shape=3)), r"info.json: the shape of 'action' is 3"),
        (info(lambda found: found.update(fps="ten")), r"info.json: fps is 'ten', expected a positive number"),
        (info(lambda found: found.pop("fps")), r"info.json: fps is None, expected a positive number"),
        (lambda root: (root / DATA).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    ],
)
def test_malformed_value_error_names_its_location(tmp_path: Path, damage: Any, said: str) -> None:
    root = write_set(tmp_path / "set")
    damage(root)
    with pytest.raises(EmbodyError, match=said):
        load_demonstrations(root)


def test_task_index_with_two_instructions_is_rejected_in_version_2(tmp_path: Path) -> None:
    root = write_v2_set(tmp_path / "set")
    with open(root / "meta/tasks.jsonl", "a", encoding="utf-8") as file:
        file.write('{"task_index": 0, "task": "open"}\n')
    with pytest.raises(EmbodyError, match=r"tasks.jsonl: task_index 0 has two instructions"):
        load_demonstrations(root)


def test_empty_third_party_dataset_error_does_not_suggest_collect(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    for path in (root / DATA, root / "meta/episodes/chunk-000/file-000.parquet"):
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(EmbodyError, match=r"contains no episodes\. Download"):
        load_demonstrations(root)


@pytest.mark.parametrize(
    "change",
    [
        info(lambda found: found["features"].update(note={"dtype": "string"})),
        *(
            column(name, lambda old: pa.array([[v] for v in old.to_pylist()], pa.list_(old.type, 1)))
            for name in ("timestamp", "frame_index", "episode_index", "index", "task_index")
        ),
        column("action", lambda old: old.cast(pa.large_list(pa.float64()))),
        lambda root: edit_episodes(root, lambda rows: [row.pop("tasks") for row in rows][:0]),
        lambda root: edit_episodes(root, lambda rows: [row.update(tasks=None) for row in rows][:0]),
    ],
)
def test_unusual_encodings_of_the_same_data_are_read(tmp_path: Path, change: Any, capsys) -> None:
    root = write_set(tmp_path / "set")
    change(root)
    found = load_demonstrations(root)
    expected = [numbers(3)(e, t) for e, length in enumerate(LENGTHS) for t in range(length)]
    np.testing.assert_array_equal(found.action, expected)
    assert {*found.instruction} == {"touch the red block"}
    assert found.warnings == ()
    names = ("success", "failure", "min_return", "max_return", "actor", "policy_version", "episodes")
    assert data(argparse.Namespace(arguments=["info", str(root)], json=False, **dict.fromkeys(names))) == 0
    assert f"3 episodes, {TOTAL} frames" in capsys.readouterr().out


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_exif_orientation_of_dataset_images_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = np.zeros((32, 32, 3), np.uint8)
    upright[:8, :16] = 250
    turn = {
        **{2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM},
        **{5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE},
        **{8: Image.Transpose.ROTATE_270},
    }
    stored = Image.fromarray(upright)
    stored = stored if orientation == 1 else stored.transpose(turn[orientation])
    exif = stored.getexif()
    exif[0x0112] = orientation
    stored.save(buffer := io.BytesIO(), "PNG", exif=exif)
    root = write_set(tmp_path / "set")
    column(FRONT, lambda old: pa.array([{"bytes": buffer.getvalue(), "path": None}] * len(old), IMAGE))(root)
    np.testing.assert_array_equal(load_demonstrations(root).images[3, 0], upright)


@pytest.mark.parametrize(
    ("values", "doubted"),
    [
        (lambda row: [2**40 + row, row, 0, 0], "[0]"),
        (lambda row: [0.1, 1.7e9 + row / 10, 0, 0], "[1]"),
        (lambda row: [1e8, row * 1e6, row / 1e9, -row], None),
    ],
)
def test_numbers_that_float32_cannot_distinguish_give_a_warning(tmp_path: Path, values: Any, doubted: Any) -> None:
    root = write_set(tmp_path / "set")
    kind = pa.list_(pa.float64())
    column("observation.state", lambda old: pa.array([values(row) for row in range(len(old))], kind))(root)
    found = load_demonstrations(root).warnings
    assert (doubted is None and found == ()) or f"dimensions {doubted}: the values differ" in found[0]


def test_missing_episodes_of_a_dataset_give_a_warning(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", info={"total_episodes": 50})
    assert "declares 50 episodes, but meta/episodes has 3" in load_demonstrations(root).warnings[0]


def test_episodes_with_the_same_video_frames_are_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    ends = {f"videos/{FRONT}/from_timestamp": 0.0, f"videos/{FRONT}/to_timestamp": 0.7}
    edit_episodes(root, lambda rows: rows[1].update(ends))
    with pytest.raises(EmbodyError, match=r"file-000.mp4: episodes 0 and 1 both refer to frame 0\. Correct"):
        load_demonstrations(root)


def test_video_with_fewer_frames_per_second_is_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    frames = iio.imread(root / VIDEO, plugin="FFMPEG")[::2]
    iio.imwrite(root / VIDEO, frames, plugin="FFMPEG", fps=5, codec="libx264", macro_block_size=2)
    with pytest.raises(EmbodyError, match=r"file-000.mp4 has 5 frames per second, but the data set has 10"):
        load_demonstrations(root)


def test_video_of_another_codec_is_read(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    frames = iio.imread(root / VIDEO, plugin="FFMPEG")
    options: dict[str, Any] = {"codec": "mpeg4", "macro_block_size": 2, "output_params": ["-q:v", "1", "-bf", "2"]}
    iio.imwrite(root / VIDEO, frames, plugin="FFMPEG", fps=10, **options)
    found = load_demonstrations(root).images[6 + 3, 0].astype(int)
    assert np.abs(found - frame(1, 3, 0)).max() < 8
