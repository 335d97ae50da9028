"""Written datasets follow the published layout, and the layout check reports violations."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from demos import ENV, card, demonstration
from PIL import Image

from embodyrl.data import layout
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.statistics import QUANTILES
from embodyrl.data.writer import DatasetWriter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "demos", 5)


def write(root: Path, count: int, *, video: bool = False) -> Path:
    writer = DatasetWriter(root, card(video=video))
    for number in range(count):
        writer.append(demonstration(number, 4 + number))
    writer.flush()
    writer.close()
    return root


def test_files_and_info_follow_the_lerobot_layout(root: Path) -> None:
    files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert files == {
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/embodyrl.json",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
    }
    info = json.loads((root / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"], info["fps"]) == (5, 30, 2, 20)
    assert info["splits"] == {"train": "0:5"}
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert info["video_path"] is None
    image = {"dtype": "image", "shape": [16, 24, 3], "names": ["height", "width", "channels"]}
    assert info["features"]["observation.images.wrist"] == image
    assert info["features"]["action"] == {"dtype": "float32", "shape": [7], "names": None}
    assert info["features"]["index"] == {"dtype": "int64", "shape": [1], "names": None}
    assert check_layout(root) == []


def test_data_rows_contain_the_columns_of_the_layout(root: Path) -> None:
    table = pq.read_table(root / "data/chunk-000/file-000.parquet")
    assert table["index"].to_pylist() == list(range(30))
    assert table["episode_index"].to_pylist() == [e for e in range(5) for _ in range(4 + e)]
    assert table["frame_index"].to_pylist() == [t for e in range(5) for t in range(4 + e)]
    np.testing.assert_allclose(
        table["timestamp"].to_numpy(), np.array(table["frame_index"].to_pylist()) / 20, atol=1e-6
    )
    assert table["task_index"].to_pylist() == [e % 2 for e in range(5) for _ in range(4 + e)]
    assert [i for i, done in enumerate(table["next.done"].to_pylist()) if done] == [3, 8, 14, 21, 29]
    assert table.schema.field("action").type == pa.list_(pa.float32(), 7)
    assert table.schema.field("observation.images.front").type == pa.struct(
        [("bytes", pa.binary()), ("path", pa.string())]
    )
    hints = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert hints["observation.images.front"] == {"_type": "Image"}
    frame = Image.open(io.BytesIO(table["observation.images.wrist"][5].as_py()["bytes"]))
    np.testing.assert_array_equal(np.asarray(frame), demonstration(1, 5).images[1, 1])
    tasks = pq.read_table(root / "meta/tasks.parquet")
    assert tasks.to_pydict() == {"task_index": [0, 1], "task": list(ENV.tasks)}
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_episode_rows_contain_offsets_statistics_and_source(root: Path) -> None:
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [r["dataset_from_index"] for r in rows] == [0, 4, 9, 15, 22]
    assert [r["length"] for r in rows] == [4, 5, 6, 7, 8]
    assert rows[3]["tasks"] == [ENV.tasks[1]]
    d = demonstration(3, 7)
    np.testing.assert_allclose(rows[3]["stats/action/mean"], d.action.mean(0), rtol=1e-5)
    np.testing.assert_allclose(rows[3]["stats/observation.state/q99"], np.quantile(d.state, 0.99, axis=0), rtol=1e-5)
    pixels = np.asarray(rows[3]["stats/observation.images.front/mean"])
    np.testing.assert_allclose(pixels[:, 0, 0], d.images[:, 0].mean(axis=(0, 1, 2)) / 255, rtol=1e-6)
    assert pixels.shape == (3, 1, 1)
    own = {k: v for k, v in rows[3].items() if k.startswith("embodyrl/") and "/pixels/" not in k}
    assert own == {
        "embodyrl/task_id": 1,
        "embodyrl/reset_id": 5,
        "embodyrl/trial": 1,
        "embodyrl/seed": 103,
        "embodyrl/version": -1,
        "embodyrl/success": False,
        "embodyrl/return": 0.0,
    }


def test_aggregated_statistics_match_all_frames(root: Path) -> None:
    stats = json.loads((root / "meta/stats.json").read_text())
    action = np.concatenate([demonstration(n, 4 + n).action for n in range(5)]).astype(np.float64)
    np.testing.assert_allclose(stats["action"]["mean"], action.mean(0), rtol=1e-9)
    np.testing.assert_allclose(stats["action"]["std"], action.std(0), rtol=1e-9)
    np.testing.assert_array_equal(stats["action"]["max"], action.max(0))
    assert stats["action"]["count"] == [30]
    state = np.concatenate([demonstration(n, 4 + n).state for n in range(5)]).astype(np.float64)
    frames = np.concatenate([demonstration(n, 4 + n).images[:, 1] for n in range(5)]).reshape(-1, 3) / 255
    for name, q in QUANTILES.items():
        np.testing.assert_allclose(stats["action"][name], np.quantile(action, q, axis=0), rtol=1e-9)
        np.testing.assert_allclose(stats["observation.state"][name], np.quantile(state, q, axis=0), rtol=1e-9)
        found = np.ravel(stats["observation.images.wrist"][name])
        np.testing.assert_allclose(found, np.quantile(frames, q, axis=0), rtol=1e-9)
    np.testing.assert_allclose(np.ravel(stats["observation.images.wrist"]["std"]), frames.std(0), rtol=1e-9)
    assert np.ravel(stats["observation.images.wrist"]["max"]).tolist() == frames.max(0).tolist()


def test_video_paths_follow_the_layout(tmp_path: Path) -> None:
    root = write(tmp_path / "demos", 3, video=True)
    assert check_layout(root) == []
    film = root / "videos/observation.images.wrist/chunk-000/file-000.mp4"
    with imageio.get_reader(film) as reader:
        assert reader.get_meta_data()["fps"] == 20
        assert reader.get_meta_data()["duration"] == pytest.approx(15 / 20, abs=0.02)
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    spans = [(r["videos/observation.images.front/from_timestamp"], r["length"]) for r in rows]
    assert spans == [(0.0, 4), (pytest.approx(0.2), 5), (pytest.approx(0.45), 6)]
    info = json.loads((root / "meta/info.json").read_text())
    assert info["features"]["observation.images.front"]["dtype"] == "video"
    assert info["video_path"] == "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    assert "observation.images.front" not in pq.read_schema(root / "data/chunk-000/file-000.parquet").names


def edit_json(root: Path, name: str, change: Callable[[dict], None]) -> None:
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def edit_column(root: Path, name: str, column: str, values: Callable[[list], list]) -> None:
    table = pq.read_table(root / name)
    place = table.column_names.index(column)
    new = pa.array(values(table[column].to_pylist()), table.schema.field(column).type)
    pq.write_table(table.set_column(place, table.schema.field(column), new), root / name)


def add_row(root: Path, name: str) -> None:
    """Add a row of an episode that is in no table."""
    table = pq.read_table(root / name)
    edit_column(root, name, "episode_index", lambda _: [99] * len(table))
    pq.write_table(pa.concat_tables([table, pq.read_table(root / name).slice(0, 1)]), root / name)


DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda r: (r / "meta/info.json").unlink(), "info cannot be read"),
        (
            lambda r: edit_json(r, "meta/info.json", lambda i: i.update(codebase_version="v2.1")),
            "codebase_version is 'v2.1'",
        ),
        (lambda r: edit_json(r, "meta/info.json", lambda i: i.update(total_episodes=6)), "total_episodes is 6"),
        (
            lambda r: edit_json(r, "meta/info.json", lambda i: i.update(total_frames=31)),
            "total_frames is 31, expected 30",
        ),
        (
            lambda r: edit_json(r, "meta/info.json", lambda i: i["features"].pop("task_index")),
            "features is {",
        ),
        (
            lambda r: edit_json(r, "meta/info.json", lambda i: i["features"]["action"].update(shape=[6])),
            "features is {",
        ),
        (lambda r: (r / "meta/tasks.parquet").write_bytes(b"x"), "tasks cannot be read"),
        (lambda r: (r / DATA).unlink(), "of episode 0 is missing"),
        (lambda r: (r / DATA).write_bytes((r / DATA).read_bytes()[:-9]), "episodes cannot be read"),
        (lambda r: edit_column(r, DATA, "timestamp", lambda v: [t * 2 for t in v]), "time stamps"),
        (lambda r: edit_column(r, DATA, "index", lambda v: v[::-1]), "episode 0: its row 0 has episode_index 4"),
        (lambda r: edit_column(r, DATA, "task_index", lambda v: [t + 1 for t in v]), "episode 0: task_index 1 is"),
        (
            lambda r: edit_column(r, DATA, "episode_index", lambda v: [0, *v[:-1]]),
            "episode 1: its row 0 has episode_index 0",
        ),
        (lambda r: edit_column(r, EPISODES, "length", lambda v: [9, *v[1:]]), "length 9"),
        (lambda r: edit_column(r, EPISODES, "dataset_from_index", lambda v: [1, *v[1:]]), "row 0 is episode 0 from 1"),
        (lambda r: edit_column(r, DATA, "index", lambda v: [*v[:-1], 0]), "row 1 is missing or duplicated"),
        (lambda r: add_row(r, DATA), "the files contain 31 rows, but meta/episodes lists 30"),
        (
            lambda r: (r / "data/chunk-000/file-001.parquet").write_bytes((r / DATA).read_bytes()),
            "no episode refers to this",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_layout_check_reports_each_violation(root: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(root)
    problems = check_layout(root)
    assert any(said in p for p in problems), problems


def test_third_party_dataset_is_described_by_its_own_files(root: Path) -> None:
    (root / layout.CARD_PATH).unlink()
    edit_json(root, layout.INFO_PATH, lambda info: info.update(fps=29.97, robot_type="arm"))
    tasks = pq.read_table(root / layout.TASKS_PATH)
    pq.write_table(tasks.take(list(range(len(tasks)))[::-1]), root / layout.TASKS_PATH)
    found = read_card(root)
    assert (found.fps, found.env.name, found.env.cameras.size, found.env.cameras.names) == (
        29.97,
        "arm",
        (16, 24),
        ("front", "wrist"),
    )
    assert [*found.env.tasks] == tasks["task"].to_pylist(), "by their numbers"
