"""`embodyrl convert`: episodes of HDF5 and RLDS sources, damaged sources, and resumption after SIGKILL."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_sets import write_set, write_v2_set

from embodyrl.cli.main import main
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.tables import read_episodes
from embodyrl.types import GripperConvention

RLDS = Path(__file__).parent / "rlds_files" / "tiny_arm"
KEYS = (
    "data.keys={observation/image: observation.images.front, observation/wrist_image: observation.images.wrist, "
    "observation/state: observation.state, observation/joints: observation.state, action: action, "
    "reward: next.reward, language_instruction: task}"
)
TEXTS = ("touch the red block", "open the door")


def libero_frame(demo: int, step: int, camera: int) -> np.ndarray:
    return np.full((16, 16, 3), (40 * demo + 3 * step + 100 * camera) % 256, np.uint8)


def write_libero(folder: Path, demos: int = 2, length: int = 4) -> Path:
    """Write two files in the layout of LIBERO's demonstrations."""
    h5py = pytest.importorskip("h5py")
    folder.mkdir()
    for task, text in enumerate(TEXTS):
        with h5py.File(folder / f"{text.replace(' ', '_')}_demo.hdf5", "w") as file:
            data = file.create_group("data")
            data.attrs["problem_info"] = json.dumps({"language_instruction": text})
            data.attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 20}})
            data.attrs["macros_image_convention"] = "opengl"
            for demo in range(demos):
                write_demo(data.create_group(f"demo_{demo}"), 100 * task + demo, length + demo % 3)
    return folder


def write_demo(group: Any, seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    action = rng.uniform(-1, 1, (length, 7))
    action[:, 6] = np.where(np.arange(length) < 2, -1, 1)
    obs = {"ee_states": rng.normal(size=(length, 6)), "gripper_states": rng.normal(size=(length, 2))}
    for camera, name in enumerate(("agentview_rgb", "eye_in_hand_rgb")):
        obs[name] = np.stack([libero_frame(seed % 100, t, camera) for t in range(length)])
    for name, values in {"actions": action, "states": rng.normal(size=(length, 9))}.items():
        group[name] = values
    group["rewards"] = group["dones"] = (np.arange(length) == length - 1).astype(np.uint8)
    for name, values in obs.items():
        group[f"obs/{name}"] = values


def convert(source: Path, out: Path, *words: str) -> int:
    return main(["convert", str(source), str(out), *words])


@pytest.mark.parametrize("images", ["png", "mp4"])
def test_libero_demonstrations_are_converted_to_a_lerobot_dataset(tmp_path: Path, images: str, capsys: Any) -> None:
    source, out = write_libero(tmp_path / "libero_toy"), tmp_path / "out"
    assert convert(source, out, f"data.images={images}") == 0
    said = capsys.readouterr().out
    assert "robot0_eye_in_hand (obs/eye_in_hand_rgb)" in said
    assert "a gripper that opens at -1 and closes at 1 · image_rotation_deg 180" in said
    assert check_layout(out) == []
    card, demos = read_card(out), load_demonstrations(out)
    assert card.env.action.gripper == GripperConvention(open=-1, closed=1)
    assert (card.env.name, card.fps, card.env.cameras.rotation_deg) == ("libero_toy", 20, 180)
    assert card.env.cameras.names == ("agentview", "robot0_eye_in_hand")
    # Files in the order of their names: open_..., touch_...
    assert card.env.tasks == TEXTS[::-1]
    assert demos.instruction.tolist() == [TEXTS[1]] * 9 + [TEXTS[0]] * 9
    rng = np.random.default_rng(101)
    action = rng.uniform(-1, 1, (5, 7))
    np.testing.assert_array_equal(demos.action[4:9, :6], action[:, :6].astype(np.float32))
    np.testing.assert_array_equal(demos.state[4:9, :6], rng.normal(size=(5, 6)).astype(np.float32))
    expected = np.stack([[libero_frame(1, t, camera) for camera in (0, 1)] for t in range(5)])
    assert np.abs(demos.images[4:9].astype(int) - expected).max() <= (4 if images == "mp4" else 0)
    assert demos.success.nonzero()[0].tolist() == (demos.stop - 1).tolist()
    assert not (tmp_path / "out.partial").exists()


def test_rlds_dataset_is_converted_to_a_lerobot_dataset(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert convert(RLDS, tmp_path / "assumed", KEYS) == 0
    assert "at 20 Hz (assumed; set data.fps)" in " ".join(capsys.readouterr().out.split())
    assert convert(RLDS, out, KEYS, "data.fps=5") == 0
    assert "assumed" not in capsys.readouterr().out.replace(str(tmp_path), "")
    assert check_layout(out) == []
    card, demos = read_card(out), load_demonstrations(out)
    assert (card.env.name, card.env.tasks, card.fps) == ("tiny_arm", TEXTS, 5)
    # The last steps (is_last) have no action.
    assert (demos.stop - demos.start).tolist() == [2, 4, 3]
    table = np.delete(np.random.default_rng(0).normal(size=(12, 9)).astype(np.float32), [2, 7, 11], axis=0)
    np.testing.assert_array_equal(demos.state, table[:, :6])
    np.testing.assert_array_equal(demos.action, table[:, 6:])
    steps = [(e, t) for e, n in enumerate((2, 4, 3)) for t in range(n)]
    shown = np.zeros((9, 16, 24, 3), np.uint8)
    shown[...] = np.array([(40 * e + 10, 12 * t + 5, 80) for e, t in steps])[:, None, None]
    np.testing.assert_array_equal(demos.images[:, 0], shown)
    assert np.abs(demos.images[:, 1].astype(int) - (255 - shown)).max() <= 3  # JPEG
    assert demos.success.nonzero()[0].tolist() == [1, 5, 8]


@pytest.mark.parametrize("dense", [False, True])
def test_success_is_unknown_where_the_source_has_none(tmp_path: Path, dense: bool) -> None:
    source, out = write_libero(tmp_path / "libero", demos=1), tmp_path / "out"
    damage_demo(source, "demo_0", replace("rewards", [0.25] * 4))
    keys = "data.keys={actions: action, obs/ee_states: observation.state" + (
        ", rewards: next.reward}" if dense else "}"
    )
    assert convert(source, out, keys) == 0
    assert check_layout(out) == []
    assert read_card(out).without == (() if dense else ("next.reward", "next.success"))
    assert {row.get("embodyrl/success", "none") for row in read_episodes(out)} == {None if dense else "none"}


@pytest.mark.parametrize("states", [np.zeros((0, 9)), 5.0, None])
def test_unusable_initial_states_are_left_out(tmp_path: Path, states: Any) -> None:
    source = write_libero(tmp_path / "libero", demos=1)
    damage_demo(source, "demo_0", lambda demo: (demo.pop("states"), demo.create_group("states")))
    if states is not None:
        damage_demo(source, "demo_0", replace("states", states))
    assert convert(source, tmp_path / "out") == 0
    assert len(read_episodes(tmp_path / "out")) == 2


def test_settings_may_change_after_a_failure_at_the_first_episode(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero", demos=1)
    damage_demo(source, "demo_0", lambda demo: demo["actions"].__setitem__((0, 0), np.nan))
    assert convert(source, tmp_path / "out", "data.fps=10") == 1
    assert not (tmp_path / "out.partial").exists()
    damage_demo(source, "demo_0", lambda demo: demo["actions"].__setitem__((0, 0), 0.0))
    assert convert(source, tmp_path / "out", "data.fps=20") == 0


def test_environment_of_the_working_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_libero(tmp_path / "libero", demos=1))
    assert convert(Path("."), tmp_path / "out") == 0
    assert read_card(tmp_path / "out").env.name == "libero"


@pytest.mark.integration
def test_conversion_continues_after_sigkill(tmp_path: Path) -> None:
    source = write_libero(tmp_path / "many", demos=36)
    assert convert(source, tmp_path / "whole") == 0
    out = tmp_path / "out"
    command = [sys.executable, "-m", "embodyrl", "convert", str(source), str(out)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline, written = time.monotonic() + 60, tmp_path / "out.partial/meta/episodes/chunk-000/file-000.parquet"
    while not written.exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not out.exists()
    assert convert(source, out) == 0
    assert not (tmp_path / "out.partial").exists()
    names = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.*"))
    assert [name for name in names if (out / name).read_bytes() != (tmp_path / "whole" / name).read_bytes()] == []


def test_incomplete_result_with_other_settings_is_rejected(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero", demos=21)
    damage_demo(source, "demo_20", lambda demo: demo["actions"].__setitem__((0, 0), np.nan))
    assert convert(source, tmp_path / "out") == 1
    assert "demo_20: action of step 0 is [nan" in capsys.readouterr().err
    assert convert(source, tmp_path / "out", "data.fps=10") == 2
    assert "was collected with other settings: fps is 20.0 in the data set, but 10.0" in capsys.readouterr().err
    assert convert(source, tmp_path / "out", "data.keys={actions: action, obs/ee_states: observation.state}") == 2
    assert "was collected with other settings" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out.partial")
    assert convert(source, tmp_path / "out", "data.skip_nonfinite=true") == 0
    assert "40 episodes, 198 frames, 2 tasks, 2 left out" in capsys.readouterr().out


def damage_demo(source: Path, name: str, change: Callable[[Any], Any]) -> None:
    h5py = pytest.importorskip("h5py")
    for path in source.iterdir():
        with h5py.File(path, "r+") as file:
            change(file["data"][name])


def shorten(demo: Any) -> None:
    values = demo["obs/ee_states"][:-1]
    del demo["obs/ee_states"]
    demo["obs/ee_states"] = values


def delete(name: str) -> Callable[[Any], None]:
    return lambda demo: demo.__delitem__(name)


def link_outside(demo: Any) -> None:
    """Replace the rewards by those of another file."""
    h5py = pytest.importorskip("h5py")
    del demo["rewards"]
    demo["rewards"] = h5py.ExternalLink("/etc/other.hdf5", "rewards")


def store_outside(demo: Any) -> None:
    """Replace the states by bytes of another file."""
    del demo["obs/ee_states"]
    demo.create_dataset("obs/ee_states", (5, 6), "f8", external=[("/etc/passwd", 0, 240)])


def replace(name: str, values: Any) -> Callable[[Any], None]:
    return lambda group: (delete(name)(group), group.__setitem__(name, values))[1]


@pytest.mark.parametrize(
    ("demo", "change", "error"),
    [
        ("demo_1", delete("actions"), "data/demo_1 has no dataset 'actions'"),
        ("demo_0", delete("actions"), "cannot be read"),
        ("demo_1", delete("obs/agentview_rgb"), "data/demo_1 has no dataset 'obs/agentview_rgb'"),
        ("demo_1", shorten, "data/demo_1: the columns have the lengths"),
        ("demo_1", lambda demo: demo["actions"].__setitem__((0, 6), 0.4), "action -1 of .*demo_1, which is in 0.4..1"),
        ("demo_1", lambda demo: demo["obs/ee_states"].__setitem__((2, 3), np.inf), "observation.state of step 2"),
        ("demo_1", link_outside, "data/demo_1/rewards' is missing, or is a link"),
        ("demo_1", store_outside, "the data of '/data/demo_1/obs/ee_states' are stored in another file"),
        ("demo_1", replace("rewards", 1.0), "data/demo_1: 'rewards' is not a numeric array with one row per step"),
        (
            "demo_1",
            replace("rewards", [b"one"] * 5),
            "data/demo_1: 'rewards' is not a numeric array with one row per step",
        ),
        ("demo_0", replace("actions", 1.0), "'/data/demo_0/actions' is not a numeric array with one row per step"),
        (
            "demo_0",
            lambda demo: (delete("actions")(demo), demo.create_group("actions")),
            "actions' is not a numeric array",
        ),
        ("demo_0", lambda demo: replace("demo_0", [1.0])(demo.parent), "'/data/demo_0' is an array instead of a group"),
        ("demo_0", lambda demo: replace("data", [1.0])(demo.file), "'/data' is an array instead of a group"),
    ],
)
def test_error_names_the_damaged_hdf5_episode(tmp_path: Path, capsys: Any, demo: str, change: Any, error: str) -> None:
    source = write_libero(tmp_path / "libero")
    if "action -1" in error:  # only values between open and closed, so that the convention is violated
        damage_demo(source, demo, lambda group: group["actions"].__setitem__((slice(None), 6), 1.0))
    damage_demo(source, demo, change)
    assert convert(source, tmp_path / "out") != 0
    assert re.search(error, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("frequency", ["NaN", "Infinity", "-5", "0"])
def test_invalid_control_frequency_is_ignored(tmp_path: Path, frequency: str) -> None:
    source = write_libero(tmp_path / "libero")
    arguments = json.dumps({"env_kwargs": {"control_freq": 1}}).replace("1", frequency)
    damage_demo(source, "demo_0", lambda demo: demo.parent.attrs.__setitem__("env_args", arguments))
    assert convert(source, tmp_path / "out") == 0
    assert read_card(tmp_path / "out").fps == 20


def test_conversion_without_observations_is_rejected(tmp_path: Path, capsys) -> None:
    """A camera of another length than the actions is no column, and then the layout is not LIBERO's."""
    source = write_libero(tmp_path / "libero", demos=1)
    damage_demo(source, "demo_0", replace("obs/agentview_rgb", np.zeros((9, 16, 16, 3), np.uint8)))
    assert convert(source, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "No column of the source is assigned to a camera or to the state" in said
    assert "obs/eye_in_hand_rgb [16, 16, 3]" in said
    assert not (tmp_path / "out").exists()


def test_success_other_than_0_or_1_is_rejected(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero")
    damage_demo(source, "demo_0", lambda demo: demo.__setitem__("won", [0, 0, 1, np.nan]))
    assert convert(source, tmp_path / "out", "data.keys={actions: action, won: next.success}") != 0
    assert "data/demo_0: won has values other than 0 and 1" in capsys.readouterr().err


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)


def step_features(features: dict[str, Any]) -> dict[str, Any]:
    steps = features["featuresDict"]["features"]["steps"]["sequence"]
    return steps["feature"]["featuresDict"]["features"]


SHARD, INFO, FEATURES = "tiny_arm-train.tfrecord-00001-of-00002", "dataset_info.json", "features.json"


@pytest.mark.parametrize(
    ("damage", "words", "error"),
    [
        (lambda r: flip(r / SHARD), [KEYS], "00001-of-00002: record 0 has a wrong checksum"),
        (lambda r: (r / SHARD).unlink(), [KEYS], "00001-of-00002 is missing"),
        (lambda r: (r / INFO).unlink(), [KEYS], "dataset_info.json is missing"),
        (lambda r: (r / INFO).write_text("{"), [KEYS], "dataset_info.json cannot be read"),
        (lambda r: (r / FEATURES).write_text("{}"), [KEYS], "does not describe an RLDS data set"),
        (
            lambda r: edit(r / FEATURES, lambda f: f.update(featuresDict=[])),
            [KEYS],
            "does not describe an RLDS data",
        ),
        (
            lambda r: edit(r / FEATURES, lambda f: step_features(f).update(action={"tensor": 3})),
            [KEYS],
            "does not describe an RLDS data set",
        ),
        (
            lambda r: edit(r / INFO, lambda i: i["splits"][0].update(shardLengths=["2", "2"])),
            [KEYS],
            "has 1 records, but dataset_info.json declares 2",
        ),
        (
            lambda r: edit(r / INFO, lambda i: i["splits"][0].update(filepathTemplate="../{SHARD_X_OF_Y}")),
            [KEYS],
            "refers to files outside the data set",
        ),
        (lambda r: edit(r / INFO, lambda i: i.update(fileFormat="array_record")), [KEYS], "the format array_record"),
        (lambda r: None, [KEYS, "data.split=test"], "has no split .test. .*: train"),
        (lambda r: None, ["data.keys={nothing: action}"], "the source has no column nothing. Columns: action"),
        (lambda r: None, ["data.keys={observation/image: action}"], "contains image, expected numbers"),
        (
            lambda r: None,
            ["data.keys={observation/state: observation.state}"],
            "No column of the source is assigned to the action",
        ),
        (lambda r: None, ["data.keys={action: actions}"], "must be names of action, observation.state"),
        (lambda r: None, ["data.keys={action: action}"], "has no instruction, expected one instruction per episode."),
        (lambda r: None, [KEYS, "data.gripper_index=5", "data.gripper=[1,0]"], "the actions have 3 numbers"),
        (lambda r: None, [KEYS, "data.grip=1"], "unknown key 'data.grip'. Did you mean 'data.gripper'"),
    ],
)
def test_damaged_rlds_or_wrong_settings_are_rejected(
    tmp_path: Path, capsys: Any, damage: Callable[[Path], Any], words: list[str], error: str
) -> None:
    source = shutil.copytree(RLDS, tmp_path / "tiny_arm")
    damage(source / "1.0.0")
    assert convert(source, tmp_path / "out", *words) != 0
    assert re.search(error, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_unknown_sources_and_existing_outputs_are_rejected(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    write_set(tmp_path / "new")
    write_v2_set(tmp_path / "old")
    for source, out, error in (
        ("none", "out", "does not exist"),
        ("empty", "out", "contains no demonstrations of a known format: expected features.json"),
        ("new", "out", "needs no conversion. Train on it: embodyrl sft data.path="),
        ("old", "out", "needs no conversion. Train on it: embodyrl sft data.path="),
        ("new", "empty", "already exists"),
    ):
        assert convert(tmp_path / source, tmp_path / out) == 2
        assert error in capsys.readouterr().err
    assert main(["convert", "one"]) == 2
    assert "needs a source and an output folder" in capsys.readouterr().err
