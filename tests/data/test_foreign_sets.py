"""Datasets of other programs: metadata is respected, and unreadable data are reported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from demos import card, demonstration
from lerobot_sets import LENGTHS, edit_episodes, frame, numbers, png, write_set

from embodyrl import files
from embodyrl.cli.main import main
from embodyrl.commands.run_folder import lock_folder
from embodyrl.commands.sft_setup import load_inputs
from embodyrl.data import rows as data_rows
from embodyrl.data.cards import read_card
from embodyrl.data.layout import CARD_PATH, OWN
from embodyrl.data.reader import Demonstrations, load_demonstrations
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.config import load_config
from embodyrl.types import GripperConvention

STEPS = [(e, t) for e, length in enumerate(LENGTHS) for t in range(length)]
DATA = "data/chunk-000/file-000.parquet"


def assert_frames(demos: Demonstrations, *, tolerance: int = 0) -> None:
    expected = np.stack([np.stack([frame(e, t, camera) for camera in (0, 1)]) for e, t in STEPS])
    assert demos.images.shape == expected.shape
    assert np.abs(demos.images.astype(int) - expected).max() <= tolerance


def test_rows_are_found_by_index_despite_a_wrong_file_number(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", data_files=(0, 1, 2))
    edit_episodes(root, lambda rows: [row.update({"data/file_index": 0}) for row in rows][:0])
    demos = load_demonstrations(root)
    assert_frames(demos)
    np.testing.assert_array_equal(demos.action, [numbers(3)(e, t) for e, t in STEPS])
    assert demos.start.tolist() == [0, 6, 13]


def test_rows_may_be_in_any_order(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    table = pq.read_table(root / DATA)
    pq.write_table(table.take(np.random.default_rng(0).permutation(len(table))), root / DATA)
    demos = load_demonstrations(root)
    assert_frames(demos)
    np.testing.assert_array_equal(demos.state, [numbers(4)(e, t) for e, t in STEPS])


@pytest.mark.parametrize("files", [(0, 0, 0), (0, 1, 1), (2, 1, 0)])
def test_each_camera_is_read_at_its_own_timestamps(tmp_path: Path, files: tuple[int, ...]) -> None:
    assert_frames(load_demonstrations(write_set(tmp_path / "set", video_files=files)), tolerance=6)


def test_video_timestamp_outside_its_episode_is_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    key = "videos/observation.images.wrist/to_timestamp"
    edit_episodes(root, lambda rows: rows[1].update({key: rows[1][key] - 0.3}))
    with pytest.raises(EmbodyError, match=r"Episode 1, step 4: the time .* of 'observation.images.wrist' is outside"):
        load_demonstrations(root)


@pytest.mark.parametrize("edge", ["from", "to"])
def test_video_timestamp_that_is_not_finite_is_an_error(edge: str, tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    key = f"videos/observation.images.wrist/{edge}_timestamp"
    edit_episodes(root, lambda rows: rows[1].update({key: float("nan")}))
    with pytest.raises(EmbodyError, match=r"episode 1 has the times .*nan.* in videos/observation.images.wrist"):
        load_demonstrations(root)


def test_too_short_video_is_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    for edge in ("from", "to"):
        key = f"videos/observation.images.front/{edge}_timestamp"
        edit_episodes(root, lambda rows, key=key: rows[2].update({key: rows[2][key] + 1.0}))
    with pytest.raises(EmbodyError, match=r"file-000.mp4 contains 21 frames, but the data set declares 31"):
        load_demonstrations(root)


def test_missing_video_columns_and_files_are_errors(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 1, 1))
    (root / "videos/observation.images.wrist/chunk-000/file-001.mp4").unlink()
    with pytest.raises(EmbodyError, match=r"wrist/chunk-000/file-001.mp4 is missing"):
        load_demonstrations(root)
    edit_episodes(root, lambda rows: [row.pop("videos/observation.images.wrist/file_index") for row in rows][:0])
    with pytest.raises(EmbodyError, match=r"episode 0 has no videos/observation.images.wrist/chunk_index, file_index"):
        load_demonstrations(root)


def test_video_frame_rate_may_exceed_the_data_rate(tmp_path: Path) -> None:
    """Frames occur twice, and the timestamps select every second frame."""
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    for camera, order in (("front", (0, 1, 2)), ("wrist", (2, 1, 0))):
        path = root / f"videos/observation.images.{camera}/chunk-000/file-000.mp4"
        frames = [frame(e, t, camera == "wrist") for e in order for t in range(LENGTHS[e])]
        options: dict[str, Any] = {"codec": "libx264", "output_params": ["-crf", "5", "-g", "2"]}
        iio.imwrite(path, np.repeat(frames, 2, axis=0), plugin="FFMPEG", fps=20, macro_block_size=2, **options)
    assert_frames(load_demonstrations(root), tolerance=6)


@pytest.mark.parametrize("names", [("channels", "height", "width"), None, ("height", "width", "channels")])
@pytest.mark.parametrize("files", [None, (0, 0, 0)])
def test_channels_first_images_are_read(tmp_path: Path, names: Any, files: Any) -> None:
    root = write_set(tmp_path / "set", shape=(3, 32, 32), names=names, video_files=files)
    assert_frames(load_demonstrations(root), tolerance=6 if files else 0)


@pytest.mark.parametrize("fps", [29.97, 30000 / 1001, 12.5])
@pytest.mark.parametrize("files", [None, (0, 1, 1)])
def test_fractional_frame_rates_are_accepted(tmp_path: Path, fps: float, files: Any) -> None:
    root = write_set(tmp_path / "set", fps=fps, video_files=files)
    assert_frames(load_demonstrations(root), tolerance=6 if files else 0)
    assert read_card(root).fps == fps


def test_timestamps_of_another_frame_rate_are_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", fps=10, info={"fps": 20})
    with pytest.raises(EmbodyError, match=r"episode 0: step 1 is 0.1000 s after .* fps 20 means 0.0500 s"):
        load_demonstrations(root)


def test_episode_can_have_two_instructions_or_an_empty_instruction(tmp_path: Path) -> None:
    tasks = ("pick the cube", "", "place the cube")
    root = write_set(tmp_path / "set", tasks=tasks, task_of=lambda e, t: 1 if e == 1 else 2 * (t >= 3))
    expected = [tasks[1 if e == 1 else 2 * (t >= 3)] for e, t in STEPS]
    assert load_demonstrations(root).instruction.tolist() == expected


def test_undeclared_instruction_is_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", tasks=("a", "b"), task_of=lambda e, t: e % 2)
    edit_episodes(root, lambda rows: rows[1].update(tasks=["a"]))
    with pytest.raises(EmbodyError, match="episode 1: task_index 1 is 'b'"):
        load_demonstrations(root)


def test_column_names_are_configurable(tmp_path: Path) -> None:
    columns = {"actions": numbers(3), "state": numbers(4)}
    root = write_set(tmp_path / "set", cameras=("image", "wrist_image"), columns=columns)
    with pytest.raises(ConfigError, match=r"data.cameras=\{image: image, wrist_image: wrist_image\}"):
        load_demonstrations(root)
    cameras = {"wrist": "wrist_image", "front": "image"}
    with pytest.raises(ConfigError, match=r"no column 'action'. Set data.action_key to one of: actions, state"):
        load_demonstrations(root, DemonstrationSettings(cameras=cameras))
    with pytest.raises(ConfigError, match=r"no column 'observation.state'. Set data.state_key to one of: state\."):
        load_demonstrations(root, DemonstrationSettings(cameras=cameras, action_key="actions"))
    demos = load_demonstrations(root, DemonstrationSettings(cameras=cameras, action_key="actions", state_key="state"))
    assert read_card(
        root, DemonstrationSettings(cameras=cameras, action_key="actions", state_key="state")
    ).env.cameras.names == (
        "wrist",
        "front",
    )
    np.testing.assert_array_equal(demos.images[:, 1, 0, 0, 2], 20)
    np.testing.assert_array_equal(demos.state, [numbers(4)(e, t) for e, t in STEPS])


def test_dataset_without_state_is_read(tmp_path: Path) -> None:
    demos = load_demonstrations(write_set(tmp_path / "set", columns={"action": numbers(3)}))
    assert (demos.state.shape, demos.action.shape) == ((21, 0), (21, 3))


def test_image_files_outside_the_dataset_are_rejected(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", cameras=("observation.images.front",))
    table = pq.read_table(root / DATA)
    (root / "images").mkdir()
    for where, error in (("images/{}.png", None), ("../{}.png", "'../0.png' is outside the folder")):
        rows = [{"bytes": None, "path": where.format(i)} for i in range(len(STEPS))]
        for i, (e, t) in enumerate(STEPS):
            (root / where.format(i)).resolve().write_bytes(png(frame(e, t, 0)))
        kind = table.schema.field("observation.images.front").type
        place = table.column_names.index("observation.images.front")
        pq.write_table(table.set_column(place, "observation.images.front", pa.array(rows, kind)), root / DATA)
        if error is None:
            np.testing.assert_array_equal(load_demonstrations(root).images[8, 0], frame(*STEPS[8], 0))
        else:
            with pytest.raises(EmbodyError, match=error):
                load_demonstrations(root)


def drop_column(root: Path, name: str) -> None:
    table = pq.read_table(root / DATA)
    pq.write_table(table.drop_columns([name]), root / DATA)


def cut_picture(root: Path, row: int) -> None:
    table, name = pq.read_table(root / DATA), "observation.images.wrist"
    pictures = table[name].to_pylist()
    pictures[row] = {**pictures[row], "bytes": pictures[row]["bytes"][:6]}
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, name, pa.array(pictures, table[name].type)), root / DATA)


def edit_info(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    change(info)
    (root / "meta/info.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda r: drop_column(r, "observation.images.wrist"), "has no column 'observation.images.wrist'"),
        (lambda r: drop_column(r, "action"), "has no column 'action', which the data set declares"),
        (lambda r: drop_column(r, "task_index"), "has no column 'task_index'"),
        (lambda r: edit_info(r, lambda i: i.pop("fps")), "info.json: fps is None"),
        (lambda r: edit_info(r, lambda i: i.update(codebase_version="v2.1")), "tasks.jsonl is missing"),
        (lambda r: edit_info(r, lambda i: i["features"]["action"].update(shape=[5])), "vectors of 3 numbers, .* 5"),
        (lambda r: edit_info(r, lambda i: i["features"]["action"].update(shape=[1, 3])), "expected one vector"),
        (
            lambda r: edit_info(r, lambda i: i["features"]["observation.images.wrist"].update(shape=[16, 32, 3])),
            "differ in size or type",
        ),
        (
            lambda r: edit_info(
                r, lambda i: i["features"]["observation.images.wrist"].update(info={"video.is_depth_map": True})
            ),
            "is a depth map",
        ),
        (
            lambda r: edit_info(r, lambda i: i.update(codebase_version="v3.1")),
            r"v3.1, expected one of .*v3\.0\. Write it",
        ),
        (lambda r: (r / "meta/tasks.parquet").unlink(), "tasks.parquet is missing"),
        (
            lambda r: cut_picture(r, 9),
            r"episode 1, step 3: 'observation.images.wrist': The frame cannot be decoded: the content is not an image",
        ),
        (
            lambda r: edit_info(
                r, lambda i: [f.update(shape=[64, 48, 3]) for k, f in i["features"].items() if "images" in k]
            ),
            r"episode 0, step 0: 'observation.images.front': The frame is 32x32 \(height x width\), .* 64x48",
        ),
        (lambda r: edit_episodes(r, lambda rows: [row.pop("length") for row in rows][:0]), "no field 'length'"),
        (lambda r: (r / DATA).unlink(), "contains no .parquet file"),
    ],
)
def test_error_names_missing_files_and_columns(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    root = write_set(tmp_path / "set")
    damage(root)
    with pytest.raises(EmbodyError, match=said):
        load_demonstrations(root)


def link_outside(root: Path, name: str) -> None:
    (root / name).rename(root.parent / "elsewhere")
    (root / name).symlink_to(root.parent / "elsewhere")


def replace_by_pipe(root: Path, name: str) -> None:
    (root / name).unlink()
    os.mkfifo(root / name)


def set_column(root: Path, column: str, path: str) -> None:
    edit_episodes(root, lambda rows: [row.update({column: path}) for row in rows][:0])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (lambda r: set_column(r, "data/path", str(r.parent / "elsewhere")), r"elsewhere' is outside the folder"),
        (lambda r: set_column(r, "data/path", "data/../../elsewhere"), r"elsewhere' is outside the folder"),
        (lambda r: link_outside(r, DATA), r"file-000.parquet' is outside the folder"),
        (lambda r: link_outside(r, "meta/tasks.parquet"), r"tasks.parquet' is outside the folder"),
        (lambda r: link_outside(r, "meta/info.json"), r"info.json' is outside the folder"),
        (lambda r: (r / "meta/embodyrl.json").symlink_to(r.parent / "elsewhere"), r"embodyrl.json' is outside"),
        (lambda r: (r / "meta/environment.yaml").symlink_to(r.parent / "elsewhere"), r"yaml' is outside the folder"),
        (lambda r: replace_by_pipe(r, DATA), r"contains no .parquet file"),
        (lambda r: replace_by_pipe(r, "meta/episodes/chunk-000/file-000.parquet"), r"is not a regular file"),
        (lambda r: link_outside(r, "videos/observation.images.front/chunk-000/file-000.mp4"), r"is outside the folder"),
    ],
)
def test_files_outside_the_dataset_are_not_read(tmp_path: Path, name: Callable[[Path], object], reason: str) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    (tmp_path / "elsewhere").write_bytes((root / DATA).read_bytes())
    name(root)
    with pytest.raises(EmbodyError, match=reason):
        load_demonstrations(root)


@pytest.mark.parametrize("split", [1, 4])
def test_more_rows_than_fit_into_memory_are_rejected(tmp_path: Path, monkeypatch: Any, split: int) -> None:
    root = write_set(tmp_path / "set")
    table = pq.read_table(root / DATA, columns=["timestamp", "frame_index", "episode_index", "index", "task_index"])
    rows = table.take(np.zeros(400_000 // split, np.int64))
    for number in range(split):
        pq.write_table(rows, root / f"data/chunk-000/file-{number:03d}.parquet", compression="zstd")
    for module in (data_rows, files):
        monkeypatch.setattr(module, "available_bytes", lambda: 200 << 20)
    with pytest.raises(EmbodyError, match="unpacks to more than 50 MiB" if split == 1 else "has too many rows"):
        load_demonstrations(root)


def test_relative_path_of_a_dataset_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    assert_frames(load_demonstrations(Path("set")))


def test_video_path_of_an_own_dataset_stays_inside(tmp_path: Path) -> None:
    root = tmp_path / "set"
    writer = DatasetWriter(root, card(video=True))
    writer.append(demonstration(0))
    writer.flush()
    writer.close()
    assert len(load_demonstrations(root).images) > 0
    (root / "videos/observation.images.front/chunk-000/file-000.mp4").rename(tmp_path / "elsewhere.mp4")
    set_column(root, "videos/observation.images.front/path", "../elsewhere.mp4")
    with pytest.raises(EmbodyError, match=r"'../elsewhere.mp4' is outside the folder"):
        load_demonstrations(root)


@pytest.mark.parametrize("video", [None, (0, 0, 0)])
def test_camera_names_cannot_place_files_outside_a_copy(tmp_path: Path, capsys: Any, video: Any) -> None:
    prefix, escape = "observation.images.", "x/../../../../victim"
    own = ("observation.images.a b", "observation.images..hidden")
    for name, cameras, code in (("own", own, 0), ("theirs", (own[0], f"{prefix}y"), 1)):
        root, out = write_set(tmp_path / name, cameras=cameras, video_files=video), tmp_path / f"{name}-copy"
        if code:
            path = "videos/observation.images.y/chunk-000/file-000.mp4" if video else None
            info = json.loads((root / "meta/info.json").read_text().replace(f"{prefix}y", prefix + escape))
            (root / "meta/info.json").write_text(json.dumps(info | {"video_path": path}))
            for file in [*root.glob("meta/episodes/*/*"), *root.glob("data/*/*")]:
                table = pq.read_table(file)
                names = [column.replace(f"{prefix}y", prefix + escape) for column in table.column_names]
                pq.write_table(table.rename_columns(names), file)
        assert main(["data", "merge", str(out), str(root), str(root)]) == code
        assert len(list(out.rglob("*.mp4"))) == (0 if code or not video else 4)
    assert "contains '/'" in capsys.readouterr().err
    assert not list(tmp_path.rglob("victim*"))


@pytest.mark.parametrize("place", [".", "episodes"], ids=["data set", "run"])
def test_dataset_command_does_not_write_through_links_at_any_level(tmp_path: Path, capsys: Any, place: str) -> None:
    root, out = write_set(tmp_path / "theirs", video_files=(0, 0, 0)), tmp_path / "out"
    merge = ["data", "merge", str(out / place), str(root), str(root)]
    assert main(merge) == 0
    (out / place / "meta/episodes/chunk-000/file-001.parquet").unlink()  # the second batch is written again
    link = out / place / "videos/observation.images.front/chunk-000/file-001.mp4"
    size = link.stat().st_size
    link.unlink()
    link.symlink_to(tmp_path / "victim.mp4")
    with pytest.raises(ConfigError, match=r"file-001.mp4 is a link to .*victim.mp4, outside"), lock_folder(out):
        pass
    assert main(merge) != 0
    assert "is a link to" in capsys.readouterr().err
    assert not (tmp_path / "victim.mp4").exists()
    link.unlink()
    camera = out / place / "videos/observation.images.front"
    camera.rename(out / "start")
    camera.symlink_to(out / "start")
    with pytest.raises(ConfigError, match="front is a link to a folder"), lock_folder(out):
        pass
    camera.unlink()
    (out / "start").rename(camera)
    link.symlink_to("file-009.mp4")
    assert main(merge) == 0
    assert (link.stat().st_size, link.is_symlink()) == (size, False)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300, None])
@pytest.mark.parametrize(("key", "width"), [("action", 3), ("observation.state", 4)])
def test_non_finite_rows_are_rejected_or_skip_their_episode(
    tmp_path: Path, key: str, width: int, value: float | None
) -> None:
    good = numbers(width)

    def bad(episode: int, step: int) -> list[Any]:
        return [good(0, 0)[0], value, *good(0, 0)[2:]] if (episode, step) == (1, 3) else good(episode, step)

    columns = {"observation.state": numbers(4), "action": numbers(3), key: bad}
    root = write_set(tmp_path / "set", columns=columns)
    if value == 1e300:  # does not fit into the float32 of the file
        table = pq.read_table(root / DATA)
        wide = pa.array([bad(e, t) for e, t in STEPS], pa.list_(pa.float64()))
        pq.write_table(table.set_column(table.column_names.index(key), key, wide), root / DATA)
    with pytest.raises(EmbodyError, match=rf"episode 1, step 3: {key}\[1\] is (nan|inf) \(1 such rows in 1 episodes"):
        load_demonstrations(root)
    demos = load_demonstrations(root, DemonstrationSettings(skip_nonfinite=True))
    assert (demos.stop - demos.start).tolist() == [6, 8]
    assert demos.skipped.tolist() == [1]
    np.testing.assert_array_equal(demos.images[6, 0], frame(2, 0, 0))
    assert np.isfinite(demos.action).all()


@pytest.mark.parametrize("files", [None, (0, 0, 0)])
def test_all_data_of_skipped_episodes_is_removed(tmp_path: Path, files: Any) -> None:
    good = numbers(3)
    columns = {"observation.state": numbers(4), "action": lambda e, t: [np.nan] * 3 if e == 1 else good(e, t)}
    root = write_set(
        tmp_path / "set", tasks=("a", "b", "c"), task_of=lambda e, t: e, columns=columns, video_files=files
    )
    edit_episodes(root, lambda rows: [row.update({f"{OWN}reset_id": 7 + row["episode_index"]}) for row in rows][:0])
    demos = load_demonstrations(root, DemonstrationSettings(skip_nonfinite=True))
    assert demos.instruction.tolist() == ["a"] * 6 + ["c"] * 8
    assert demos.reset_id.tolist() == [7, 9]
    expected = np.stack([np.stack([frame(e, t, camera) for camera in (0, 1)]) for e, t in STEPS if e != 1])
    assert np.abs(demos.images.astype(int) - expected).max() <= (6 if files else 0)


def test_gripper_convention_must_match_the_actions(tmp_path: Path) -> None:
    opens = {"action": lambda e, t: [0.1, 0.2, float(t % 2)], "observation.state": numbers(4)}
    root = write_set(tmp_path / "set", columns=opens)
    fits = DemonstrationSettings(gripper=[1, 0], image_rotation_deg=180)
    assert read_card(root, fits).env.cameras.rotation_deg == 180
    assert read_card(root, fits).env.action.gripper == GripperConvention(open=1.0, closed=0.0)
    load_demonstrations(root, fits)
    for ends in ([-1, 1], [0.5, 0]):
        with pytest.raises(ConfigError, match=r"action -1 of .*, which is in 0..1"):
            load_demonstrations(root, DemonstrationSettings(gripper=ends))
    with pytest.raises(ConfigError, match=r"data.gripper_index=7"):
        load_demonstrations(root, DemonstrationSettings(gripper=[1, 0], gripper_index=7))


@pytest.mark.parametrize(
    ("ends", "values", "warning"),
    [
        ([-1, 1], [1.0], "action -1 of the data is always 1"),
        ([0, 1], [0.0, 0.1, 0.45], "action -1 of the data is in 0..0.45 only"),
        ([-1, 1], [0.0, 0.3, 1.0], "action -1 of the data is in 0..1 only"),
        ([1, 0], [0.3, 0.9, 1.0], None),
        ([1, 0], [0.0, 1.0], None),
    ],
)
def test_sft_warns_of_a_gripper_that_hardly_moves(tmp_path: Path, ends: Any, values: Any, warning: Any) -> None:
    columns = {"action": lambda e, t: [0.1, 0.01 * t, values[t % len(values)]], "observation.state": numbers(4)}
    root = write_set(tmp_path / "set", columns=columns)
    cfg = load_config("sft", [f"data.path={root}", f"data.gripper={ends}".replace(" ", ""), "model=cnn"])
    warnings = [text for label, text in load_inputs(cfg, tmp_path / "start").notes if label == "warning"]
    assert [warning] == [text.partition(". ")[0].partition(": ")[2] for text in warnings] if warning else not warnings
    assert all(text.startswith(f"data.gripper=[{ends[0]},{ends[1]}]: ") for text in warnings)


@pytest.mark.parametrize(("ends", "values"), [([0, 1], [-1.0, 1.0]), ([-1, 1], [0.0]), ([-1, 1], [0.0, 1.0])])
def test_gripper_actions_outside_the_convention_are_an_error(tmp_path: Path, ends: Any, values: Any) -> None:
    columns = {"action": lambda e, t: [0.1, 0.2, values[t % len(values)]], "observation.state": numbers(4)}
    root = write_set(tmp_path / "set", columns=columns)
    with pytest.raises(ConfigError, match=rf"data.gripper=\[{ends[0]},{ends[1]}\] does not match action -1 of "):
        load_demonstrations(root, DemonstrationSettings(gripper=ends))


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((48, 32, 3), ("width", "height", "channels")),
        ((3, 48, 32), ("channels", "width", "height")),
        ((32, 48, 3), ("height", "width", "rgb")),
    ],
)
def test_image_height_is_found_by_axis_names(tmp_path: Path, shape: Any, names: Any) -> None:
    root = write_set(tmp_path / "set", shape=shape, names=names)
    assert read_card(root).env.cameras.size == (32, 48)


def test_frame_rate_of_an_own_dataset_must_be_positive(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "set" / CARD_PATH
    writer = DatasetWriter(tmp_path / "set", card())
    writer.append(demonstration(0))
    writer.flush()
    writer.close()
    assert main(["data", "info", str(tmp_path / "set")]) == 0
    saved = json.loads(file.read_text())
    for fps in (0, -1, np.nan, np.inf):
        file.write_text(json.dumps(saved | {"fps": fps}))
        assert main(["data", "info", str(tmp_path / "set")]) == 1
        assert "expected a positive number" in capsys.readouterr().err
