"""HDF5 sources: attributes of files and episodes, masks, copies, and files without attributes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_convert import TEXTS, convert, write_demo, write_libero

from embodyrl.data.cards import read_card
from embodyrl.data.reader import Demonstrations, load_demonstrations

h5py = pytest.importorskip("h5py")
FIRST, SECOND = (f"{text.replace(' ', '_')}_demo.hdf5" for text in TEXTS[::-1])
KEYS = (
    "data.keys={obs/agentview_rgb: observation.images.front, obs/ee_states: observation.state, actions: action}",
    "data.instruction=lift",
)


def change(source: Path, name: str, edit: Callable[[Any], Any]) -> None:
    with h5py.File(source / name, "r+") as file:
        edit(file)


def converted(source: Path, out: Path, *words: str) -> Demonstrations:
    assert convert(source, out, *words) == 0
    return load_demonstrations(out)


def refused(source: Path, capsys: Any, *words: str) -> str:
    assert convert(source, source.parent / "refused", *words) != 0
    return " ".join(capsys.readouterr().err.split())


def env_args(**values: Any) -> Callable[[Any], None]:
    return lambda file: file["data"].attrs.__setitem__("env_args", json.dumps({"env_kwargs": values}))


@pytest.mark.parametrize("flag", [False, np.bool_(False), 0, np.int64(0), "False", b"false", np.array([0.0])])
def test_failed_demonstrations_are_excluded_and_counted(tmp_path: Path, capsys: Any, flag: Any) -> None:
    source = write_libero(tmp_path / "libero", demos=3)
    change(source, FIRST, lambda file: file["data/demo_1"].attrs.__setitem__("success", flag))
    change(source, SECOND, lambda file: file["data/demo_0"].attrs.__setitem__("success", True))
    change(source, SECOND, lambda file: file["data/demo_1"].attrs.__setitem__("is_success", flag))
    demos = converted(source, tmp_path / "out")
    assert "left out 2 demonstrations (success=False)" in " ".join(capsys.readouterr().out.split())
    assert (demos.stop - demos.start).tolist() == [4, 6, 4, 6]


def test_invalid_success_and_data_without_successes_are_rejected(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero", demos=1)
    change(source, FIRST, lambda file: file["data"].attrs.__setitem__("success", False))
    change(source, SECOND, lambda file: file["data/demo_0"].attrs.__setitem__("success", "maybe"))
    assert "the attribute success is 'maybe', expected true or false" in refused(source, capsys)
    (source / SECOND).unlink()
    assert "no demonstration is left; skipped: 1 demonstrations (success=False)" in refused(source, capsys)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (
            lambda f: f["data"].attrs.__setitem__("macros_image_convention", "opencv"),
            'macros_image_convention "opencv"',
        ),
        (lambda f: f["data/demo_1"].attrs.__setitem__("macros_image_convention", b"opencv"), "data/demo_1 has macros_"),
        (env_args(control_freq=10), r"control_freq 10.0, but .*open_the_door_demo.hdf5, data/demo_0 has 20.0"),
        (
            lambda f: f["data/demo_0"].attrs.__setitem__("env_args", np.bytes_('{"env_kwargs": {"control_freq": 5}}')),
            "data/demo_0 has control_freq 5.0",
        ),
        (
            env_args(control_freq=20, controller_configs={"type": "OSC_POSE", "control_delta": False}),
            "its actions are absolute",
        ),
        (
            env_args(controller_configs={"body_parts": {"right": {"input_type": "absolute"}}}),
            "its actions are absolute",
        ),
        (env_args(control_delta=False), "its actions are absolute"),
        (lambda f: f["data"].attrs.__setitem__("control_delta", False), "its actions are absolute"),
        (lambda f: f.move("data", "demos"), "'//?data' is missing"),
        (lambda f: f["data"].create_group("lost"), "data/lost has no dataset 'actions'"),
        (lambda f: f.create_dataset("mask/train", data=[b"demo_7"]), "mask/train names demo_7"),
    ],
)
def test_differing_conventions_and_unknown_groups_are_rejected(
    tmp_path: Path, capsys: Any, edit: Callable[[Any], Any], error: str
) -> None:
    source = write_libero(tmp_path / "libero")
    change(source, SECOND, edit)
    assert re.search(error, refused(source, capsys))


@pytest.mark.parametrize(
    ("name", "value"),
    [("macros_image_convention", "opencv"), ("env_args", json.dumps({"env_kwargs": {"control_freq": 10}}))],
)
def test_missing_conventions_have_defaults(tmp_path: Path, capsys: Any, name: str, value: str) -> None:
    source = write_libero(tmp_path / "libero", demos=1)
    change(source, FIRST, lambda file: file["data"].attrs.__delitem__(name))
    change(source, SECOND, lambda file: file["data"].attrs.__setitem__(name, value))
    assert "Convert files with different conventions to separate data sets." in refused(source, capsys)
    change(source, SECOND, lambda file: file["data"].attrs.__delitem__(name))
    converted(source, tmp_path / "out")


def test_controllers_of_two_files_must_be_equal(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero", demos=1)
    for name, kind in ((FIRST, "OSC_POSE"), (SECOND, "JOINT_VELOCITY")):
        change(source, name, env_args(controller_configs={"type": kind}))
    assert "has controller_configs" in refused(source, capsys)


def test_absolute_actions_give_a_warning(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "arm", demos=1)
    (source / SECOND).unlink()
    absolute = env_args(controller_configs={"control_delta": False})
    change(source, FIRST, lambda file: (absolute(file), file["data/demo_0/obs"].__delitem__("gripper_states")))
    assert convert(source, tmp_path / "out", *KEYS) == 0
    assert "warning the actions are absolute (control_delta=false)" in " ".join(capsys.readouterr().out.split())


def test_image_convention_attribute_sets_the_image_rotation(tmp_path: Path) -> None:
    source = write_libero(tmp_path / "libero", demos=1)
    for name in (FIRST, SECOND):
        change(source, name, lambda file: file["data"].attrs.__setitem__("macros_image_convention", "opencv"))
    converted(source, tmp_path / "out")
    assert read_card(tmp_path / "out").env.cameras.rotation_deg == 0
    for name in (FIRST, SECOND):
        change(source, name, lambda file: file["data"].attrs.__setitem__("macros_image_convention", "directx"))
    assert convert(source, tmp_path / "other") == 2


@pytest.mark.parametrize(
    ("masks", "words", "lengths"),
    [
        ({"train": [0, 2], "valid": [1]}, (), [4, 6]),
        ({"valid": [1]}, (), [4, 6]),
        ({"train": [0, 2], "valid": [1]}, ("data.split=valid",), [5]),
        ({"20_percent": [0]}, (), [4, 5, 6]),
    ],
)
def test_robomimic_masks_select_episodes(
    tmp_path: Path, masks: dict[str, list[int]], words: tuple[str, ...], lengths: list[int]
) -> None:
    source = write_libero(tmp_path / "libero", demos=3)
    (source / SECOND).unlink()
    for name, members in masks.items():
        names = [f"demo_{number}".encode() for number in members]
        change(source, FIRST, lambda file, key=f"mask/{name}", names=names: file.create_dataset(key, data=names))
    demos = converted(source, tmp_path / "out", *words)
    assert (demos.stop - demos.start).tolist() == lengths


def test_unknown_mask_is_rejected(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero")
    assert "has no mask 'valid'. Masks: none." in refused(source, capsys, "data.split=valid")


def test_hidden_copies_are_skipped(tmp_path: Path) -> None:
    source = write_libero(tmp_path / "libero")
    (source / ".ipynb_checkpoints").mkdir()
    shutil.copy(source / FIRST, source / ".ipynb_checkpoints" / FIRST.replace("_demo", "_demo-checkpoint"))
    (source / f"._{FIRST}").write_bytes(b"Mac OS X")
    assert converted(source, tmp_path / "out").num_episodes == 4


def test_linked_files_outside_the_folder_are_rejected(tmp_path: Path, capsys: Any) -> None:
    source = write_libero(tmp_path / "libero")
    (source / FIRST).rename(tmp_path / "private.hdf5")
    (source / FIRST).symlink_to(tmp_path / "private.hdf5")
    assert convert(source, tmp_path / "out") != 0
    assert "is outside the folder" in capsys.readouterr().err


def test_hdf5_episodes_need_not_be_named_demo(tmp_path: Path) -> None:
    source = write_libero(tmp_path / "libero")
    change(source, FIRST, lambda file: file["data"].move("demo_0", "episode_10"))
    change(source, FIRST, lambda file: file["data"].move("demo_1", "episode_2"))
    demos = converted(source, tmp_path / "out")
    assert (demos.stop - demos.start).tolist() == [5, 4, 4, 5], "episode_2 before episode_10"


def test_libero_files_without_attributes_take_the_instruction_from_their_name(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "libero_no_noops"
    source.mkdir()
    names = {
        "KITCHEN_SCENE10_close_the_top_drawer_demo": "close the top drawer",
        "LIVING_ROOM_SCENE5_put_the_red_mug_on_the_left_plate_demo": "put the red mug on the left plate",
        "pick_up_the_milk_demo": "pick up the milk",
    }
    for seed, name in enumerate(names):
        with h5py.File(source / f"{name}.hdf5", "w") as file:
            write_demo(file.create_group("data/demo_0"), seed, 4)
    assert converted(source, tmp_path / "out").instruction[::4].tolist() == list(names.values())
    (source / "pick_up_the_milk_demo.hdf5").rename(source / "part1.hdf5")
    assert "part1.hdf5, data/demo_0 has no instruction" in refused(source, capsys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("language_instruction", "lift it"),
        ("ep_meta", json.dumps({"lang": "lift it"})),
        ("problem_info", np.bytes_(json.dumps({"language_instruction": ["lift", "it"]}))),
    ],
)
def test_instruction_of_an_episode_overrides_that_of_its_file(
    tmp_path: Path, capsys: Any, name: str, value: Any
) -> None:
    source = write_libero(tmp_path / "libero")
    change(source, FIRST, lambda file: file["data/demo_1"].attrs.__setitem__(name, value))
    assert converted(source, tmp_path / "out").instruction[[0, 4, 9]].tolist() == [TEXTS[1], "lift it", TEXTS[0]]
    assert "has 3 instructions (lift it, open the door" in refused(source, capsys, "data.instruction=lift")
