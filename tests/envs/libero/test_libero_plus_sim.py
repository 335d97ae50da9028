"""LIBERO-Plus in the real simulator: camera and arm poses match the public package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import FACTORY
from embodyrl.envs.libero.plus import get_variant
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import InitParams
from embodyrl.types import EpisodeStart, ObservationOut

pytestmark = pytest.mark.sim

PACKAGE = json.loads((Path(__file__).parents[2] / "golden/libero_plus/variants.json").read_text())["variants"]
PLAYED = [row for row in PACKAGE if "joints" in row]
SIZE, CAMERAS = 64, ["agentview", "robot0_eye_in_hand"]
STILL = np.zeros((1, 1, 7), np.float32)


def same_turn(one, other):
    """Return whether two quaternions are the same rotation; their lengths may differ."""
    return abs(np.dot(one, other)) / np.linalg.norm(one) / np.linalg.norm(other) == pytest.approx(1.0, abs=1e-12)


def harness(suite, axes=(), *, env_indices=1, size=SIZE, lean=True, fast=False):
    from embodyrl.envs.libero.sims import LiberoSims

    cameras = InitParams(camera_names=CAMERAS, camera_heights=size, camera_widths=size)
    spec = FACTORY.spec(env_of("libero", task_suite_name=suite, init_params=cameras), EnvContext(suites=axes))
    install.prepare_process()
    sims = LiberoSims(spec, max_models=1, lean=lean, fast=fast)
    return ChunkedEnv(sims, env_indices, use_rel_reward=True, reward_coef=1.0)


def start(env, task, state, env_index=0, seed=0):
    reset_id = env.spec.get_reset_ids(task)[state]
    env.reset([env_index], [EpisodeStart(reset_id=reset_id, seed=seed, max_episode_steps=280)])


def look(env, env_index=0):
    height, width = env.spec.cameras.size
    out = ObservationOut(images=np.zeros((2, height, width, 3), np.uint8), state=np.zeros(8, np.float32))
    env.observe([env_index], out.images[None], out.state[None])
    return out.images


@pytest.fixture(scope="module")
def env():
    """Return tasks 0 to 9 of libero_object, then with other cameras, with noise and with other words."""
    found = harness("libero_object", ("camera", "noise", "language"), env_indices=2)
    yield found
    found.close()


@pytest.mark.parametrize("row", PLAYED, ids=lambda row: row["suite"])
def test_simulated_arms_and_cameras_match_the_package(row):
    """Joint positions after setting the stored state and ten settle steps, on the table and on the floor."""
    env = harness(f"{row['suite']}_robot")
    try:
        start(env, row["task"], row["state"])
        simulator = env._sims.pool.use(0)
        joints = simulator._data.qpos[simulator._robot._ref_joint_pos_indexes]
        np.testing.assert_allclose(joints, row["joints"], atol=1e-9)
        camera = simulator._model.camera("agentview").id
        np.testing.assert_allclose(simulator._model.cam_pos[camera], row["camera"][:3], atol=1e-9)
        assert same_turn(simulator._model.cam_quat[camera], row["camera"][3:])
    finally:
        env.close()


def test_envs_on_a_shared_model_have_separate_variants(env):
    start(env, 13, 0)
    before = look(env).copy()
    start(env, 13, 1, env_index=1)
    other = look(env, 1).copy()
    np.testing.assert_array_equal(look(env), before)
    np.testing.assert_array_equal(look(env, 1), other)
    assert np.abs(before[0].astype(int) - other[0]).mean() > 1.0
    start(env, 23, 0)
    env.step_chunk([0], STILL)
    noisy = look(env).copy()
    start(env, 23, 1, env_index=1)
    other = look(env, 1).copy()
    np.testing.assert_array_equal(look(env), noisy, err_msg="its own noise, of its own step")
    np.testing.assert_array_equal(look(env, 1), other)
    start(env, 33, 0)
    start(env, 33, 1, env_index=1)
    changes = [get_variant("libero_object_language", 3, state)[0] for state in (0, 1)]
    assert [env.instruction(0), env.instruction(1)] == [change.instruction for change in changes]


def test_perturbation_is_removed_after_its_episode(env):
    """Moved cameras, another arm pose and noise, in sequence in one model."""
    start(env, 3, 0)
    simulator, state = env._sims.pool.use(0), install.load_init_states("libero_object", 3)[0]
    place = simulator._model.cam_pos[simulator._model.camera("agentview").id]
    wanted = (("camera", 1), ("camera", 45), ("robot", 0), ("noise", 1))
    moved, further, tilted, noisy = (get_variant(f"libero_object_{axis}", 3, number)[0] for axis, number in wanted)

    def begun(change):
        simulator.reset(state, 0, change)
        return look(env).copy(), simulator._data.qpos.copy(), place.copy()

    usual, first, away, again, turned, last = map(begun, (None, moved, further, moved, tilted, None))
    begun(noisy)
    for one, two in zip((*again, *last, *begun(None)), (*first, *usual, *usual), strict=True):
        np.testing.assert_array_equal(one, two)
    sampled = simulator.sample_state(5)
    begun(tilted)
    np.testing.assert_array_equal(simulator.sample_state(5), sampled)
    assert min(np.abs(one[2] - two[2]).max() for one, two in ((first, usual), (away, first))) > 0.01
    assert np.abs(turned[1] - usual[1]).max() > 0.01


def test_noise_affects_the_front_camera_reproducibly(env):
    foggy = next(k for k in range(50) if 31 <= get_variant("libero_object_noise", 3, k)[0].noise <= 40)
    start(env, 3, 0)
    clean = look(env).copy()
    start(env, 23, foggy)
    first = look(env).copy()
    np.testing.assert_array_equal(look(env), first, err_msg="asked twice")
    env.step_chunk([0], STILL)
    second = look(env).copy()
    assert np.abs(first[0].astype(int) - clean[0]).mean() > 5.0
    np.testing.assert_array_equal(first[1], clean[1])
    assert np.abs(second[0].astype(int) - first[0]).mean() > 1.0, "the next step has noise of its own"
    assert np.abs(env.render(0)[:, :SIZE].astype(int) - second[0][::-1]).max() == 0, "videos show what is seen"
    start(env, 23, foggy, seed=5)
    np.testing.assert_array_equal(look(env), first)
    start(env, 3, 0)
    np.testing.assert_array_equal(look(env), clean, err_msg="nothing of a variant is left")
