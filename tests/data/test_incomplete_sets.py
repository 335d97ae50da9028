"""Data sets of other programs with deleted episodes, named numbers, or a variable frame rate."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_sets import LENGTHS, edit_episodes, frame, numbers, write_lines, write_set, write_v2_set

from embodyrl.cli.data import data
from embodyrl.data.checks import check_layout
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.errors import EmbodyError

DATA = "data/chunk-000/file-000.parquet"
KEPT = (0, 2)
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"


def delete_episode(root: Path, number: int) -> Path:
    """Delete an episode of a v3.0 set without renumbering."""
    table = pq.read_table(root / DATA)
    keep = [episode != number for episode in table["episode_index"].to_pylist()]
    pq.write_table(table.filter(pa.array(keep)), root / DATA)
    edit_episodes(root, lambda rows: rows.pop(number))
    info = json.loads((root / "meta/info.json").read_text())
    info |= {"total_episodes": 2, "total_frames": sum(LENGTHS) - LENGTHS[number]}
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def check_kept(found) -> None:
    values = numbers(3)
    expected = [values(episode, step) for episode in KEPT for step in range(LENGTHS[episode])]
    np.testing.assert_array_equal(found.action, np.array(expected, np.float32))
    assert (found.stop - found.start).tolist() == [LENGTHS[episode] for episode in KEPT]


@pytest.mark.parametrize("video", [None, (0, 0, 0)])
def test_episode_numbers_may_have_gaps(tmp_path: Path, video) -> None:
    found = load_demonstrations(delete_episode(write_set(tmp_path / "set", video_files=video), 1))
    check_kept(found)
    shown = [frame(episode, step, 0)[0, 0] for episode in KEPT for step in range(LENGTHS[episode])]
    assert np.abs(found.images[:, 0, 0, 0].astype(int) - np.array(shown, int)).max() <= (0 if video is None else 8)


def test_row_numbers_may_begin_above_zero(tmp_path: Path) -> None:
    root = delete_episode(write_set(tmp_path / "set"), 0)
    assert load_demonstrations(root).stop.tolist() == [LENGTHS[1], LENGTHS[1] + LENGTHS[2]]


def test_repeated_episode_numbers_are_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    edit_episodes(root, lambda rows: rows[2].update(episode_index=1))
    with pytest.raises(EmbodyError, match="row 2 is episode 1"):
        load_demonstrations(root)


def test_error_names_the_non_finite_episode_after_a_gap(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    table = pq.read_table(root / DATA)
    rows = table["action"].to_pylist()
    rows[-1] = [float("nan"), 0.0, 0.0]
    action = pa.array(rows, pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", action), root / DATA)
    delete_episode(root, 1)
    with pytest.raises(EmbodyError, match=f"episode 2, step {LENGTHS[2] - 1}"):
        load_demonstrations(root)
    found = load_demonstrations(root, DemonstrationSettings(skip_nonfinite=True))
    assert found.skipped.tolist() == [2]


def test_v2_episode_numbers_may_have_gaps(tmp_path: Path) -> None:
    root = write_v2_set(tmp_path / "set")
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    write_lines(root / "meta/episodes.jsonl", [lines[episode] for episode in KEPT])
    (root / "data/chunk-000/episode_000001.parquet").unlink()
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 2}))
    check_kept(load_demonstrations(root))


def named(root: Path, key: str, names) -> Path:
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][key]["names"] = names
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def names_of(root: Path) -> list:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    return [features[key]["names"] for key in ("observation.state", "action")]


def merged(out: Path, *paths: Path) -> Path:
    flags = ("success", "failure", "min_return", "max_return", "actor", "policy_version", "episodes")
    data(argparse.Namespace(arguments=["merge", str(out), *map(str, paths)], json=True, **dict.fromkeys(flags)))
    return out


def test_copies_keep_dimension_names(tmp_path: Path) -> None:
    names = ["x", "y", "grip"]
    root = named(write_set(tmp_path / "set"), "action", {"motors": names})
    both = merged(tmp_path / "both", root, root)
    assert names_of(both) == [None, names]
    assert check_layout(both) == []
    incomplete = merged(tmp_path / "incomplete", delete_episode(root, 1), root)
    assert names_of(incomplete) == [None, names]
    assert (load_demonstrations(incomplete).action == np.tile(load_demonstrations(root).action, (2, 1))).all()


@pytest.mark.integration
def test_variable_frame_rate_is_an_error(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", video_files=(0, 0, 0))
    slow = tmp_path / "slow.mp4"
    times = r"settb=1/1000,setpts='if(lt(N,10),N*50,500+(N-10)*140)'"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(root / VIDEO), "-vf", times]
    subprocess.run([*command, "-fps_mode", "vfr", "-enc_time_base", "1:1000", "-c:v", "libx264", str(slow)], check=True)
    slow.replace(root / VIDEO)
    with pytest.raises(EmbodyError, match="variable frame rate"):
        load_demonstrations(root)
