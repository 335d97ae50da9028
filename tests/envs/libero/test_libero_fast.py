"""Lean visuals and the faster inner loop on the real LIBERO, bit-identical or equal up to rounding."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from processes import command_environment
from settings import env_of

from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import FACTORY
from embodyrl.envs.protocol import EnvContext
from embodyrl.types import EpisodeStart

mujoco = pytest.importorskip("mujoco")

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


def simulator(suite, task, **options):
    from embodyrl.envs.libero.simulator import TaskSimulator

    install.prepare_process()
    entry = install.get_suite_tasks(suite)[task]
    path = install.get_libero_path("bddl_files") / entry.problem_folder / entry.bddl_file
    return TaskSimulator(path, **options)


def states(sim, suite, task, actions, index=3):
    sim.reset(install.load_init_states(suite, task)[index], 7)
    rows, success = [], []
    for action in actions:
        success.append(sim.step(action).success)
        rows.append(np.concatenate([sim._data.qpos, sim._data.qvel, sim._data.act]))
    return np.array(rows), success


def image(sim, size=128):
    images, state = np.zeros((1, size, size, 3), np.uint8), np.zeros(8, np.float32)
    sim.observe(("agentview",), images, state)
    return images[0], state


def random_actions(count, seed=0):
    actions = np.clip(np.random.default_rng(seed).normal(size=(count, 7)) * 0.5, -1, 1)
    actions[::7, 6] = 0.0  # neither opens nor closes
    return actions


@pytest.mark.parametrize(
    ("suite", "task"),
    [
        ("libero_10", 5),
        pytest.param("libero_goal", 7, marks=pytest.mark.slow),
        pytest.param("libero_object", 0, marks=pytest.mark.slow),
        pytest.param("libero_spatial", 4, marks=pytest.mark.slow),
        pytest.param("libero_90", 0, marks=pytest.mark.slow),
    ],
)
def test_lean_and_fast_profiles_match_full_simulation_states(suite, task):
    actions = random_actions(100)
    full = simulator(suite, task)
    expected, success = states(full, suite, task, actions)
    picture, proprio = image(full)
    full.close()

    lean = simulator(suite, task, lean=True)
    found, lean_success = states(lean, suite, task, actions)
    np.testing.assert_array_equal(found, expected)
    assert lean_success == success
    lean_picture, lean_proprio = image(lean)
    np.testing.assert_array_equal(lean_proprio, proprio)
    error = np.mean((lean_picture.astype(float) - picture) ** 2)
    assert 0 < error < 255**2 / 10**2.2, "another image, but of the same scene (over 22 dB)"
    lean.close()

    fast = simulator(suite, task, lean=True, fast=True)
    found, fast_success = states(fast, suite, task, actions)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert fast_success == success
    fast_picture, fast_proprio = image(fast)
    np.testing.assert_allclose(fast_proprio, proprio, atol=1e-6)
    assert np.abs(fast_picture.astype(int) - lean_picture).max() <= 2
    fast.close()


def test_fast_and_original_loop_succeed_at_the_same_step():
    """Grasping and lifting amplify differences; success must still occur at the same step."""
    from embodyrl.envs.libero.expert import Expert

    suite, task, index = "libero_goal", 8, 11
    fast = simulator(suite, task, lean=True, fast=True)
    fast.reset(install.load_init_states(suite, task)[index], 7)
    expert, actions, success = Expert(3), [], []
    while not (success and success[-1]):
        actions.append(expert.act(fast.scene))
        success.append(fast.step(actions[-1]).success)
        assert len(actions) < 200
    fast.close()
    stock = simulator(suite, task, lean=True)
    assert states(stock, suite, task, actions, index)[1] == success
    stock.close()


@pytest.mark.parametrize(
    ("suite", "task"),
    [
        ("libero_spatial", 4),
        pytest.param("libero_10", 5, marks=pytest.mark.slow),
        pytest.param("libero_goal", 7, marks=pytest.mark.slow),
    ],
)
def test_skipped_work_of_lean_rendering_does_not_change_images(suite, task):
    sim = simulator(suite, task, lean=True, fast=True)
    renderer, hidden = sim._lean, []
    model = renderer._model
    sphere = mujoco.mjtGeom.mjGEOM_SPHERE

    def compare():
        with sim._observed_poses():
            for camera in ("agentview", "robot0_eye_in_hand", "frontview"):
                hidden.append(
                    len(renderer._visible) - len(renderer._get_geoms_in_view(model.camera(camera).id, 160 / 128))
                )
                groups = model.geom_group.copy(), model.site_group.copy()
                found = renderer.render(camera, 128, 160)
                for group, before in zip((model.geom_group, model.site_group), groups, strict=True):
                    np.testing.assert_array_equal(group, before)
                expected = renderer.sim.render(camera_name=camera, width=160, height=128)
                np.testing.assert_array_equal(found, expected)
                assert len(np.unique(found)) > 50, "a scene, not an empty image"
            return found

    for index in (3, 4):  # two environments that share the model, with different images of objects at rest
        sim.reset(install.load_init_states(suite, task)[index], index)
        for number, action in enumerate(random_actions(24)):
            sim.step(action)
            if number % 8 == 0:
                compare()
        if index == 3:
            first = sim.save()
    sim.load(first)
    before = compare()
    sim._observed_sites[0] = 1.0, 0.0, 0.0, 0.5
    model.site_group[0], model.site_type[0], model.site_size[0] = 1, sphere, 0.3
    assert (compare() != before).mean() > 0.01, "a transparent site in front of geoms at rest"
    assert max(hidden) > 40
    assert len(renderer._layers) > 4
    sim.close()


def test_lean_images_of_objects_in_front_of_the_sky_match_full_rendering():
    sim = simulator("libero_spatial", 4, lean=True, fast=True)
    sim.reset(install.load_init_states("libero_spatial", 4)[3], 3)
    camera = sim._model.camera("agentview").id
    # Above the walls, which have no ceiling, and below the hand: most pixels show the sky.
    sim._model.cam_pos[camera], sim._model.cam_quat[camera] = sim._data.site_xpos[sim._robot.eef_site_id], (0, 1, 0, 0)
    sim._model.cam_pos[camera] -= 0.0, 0.0, 0.3
    for action in random_actions(3):
        sim.step(action)
        with sim._observed_poses():
            found = sim._lean.render("agentview", 128, 128)
            expected = sim._lean.sim.render(camera_name="agentview", width=128, height=128)
            flags = sim._lean._context.scn.flags
            flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0
            without = sim._lean.sim.render(camera_name="agentview", width=128, height=128)
            flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 1
        np.testing.assert_array_equal(found, expected)
        assert 0.2 < (expected != without).any(-1).mean() < 0.95
    sim.close()


def test_repeated_episode_renders_few_images(monkeypatch):
    """A policy without sampling repeats episodes: then the whole arm is an object at rest in each of its poses."""
    sim = simulator("libero_object", 0, lean=True, fast=True)
    images, counts, original = np.zeros((1, 128, 128, 3), np.uint8), [], mujoco.mjr_render

    def counted(*args):
        counts[-1] += 1
        return original(*args)

    monkeypatch.setattr(mujoco, "mjr_render", counted)
    for _ in range(2):
        sim.reset(install.load_init_states("libero_object", 0)[20], 0)
        for action in random_actions(6):
            sim.step(action)
            counts.append(0)
            sim.observe(("agentview",), images, np.zeros(8, np.float32))
    sim.close()
    assert max(counts[7:]) <= 3, counts


def test_fast_physics_defaults_to_the_profile_value():
    for profile, key, expected in (("full", None, False), ("lean", None, True), ("lean", False, False)):
        cfg = env_of("libero", task_suite_name="libero_goal", render_profile=profile, fast_physics=key)
        env = FACTORY.make(cfg, EnvContext())
        assert env._sims._options.items() >= {"lean": profile == "lean", "fast": expected}.items()  # type: ignore[attr-defined]
        env.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fast_loop_compiles_before_the_first_reset(tmp_path):
    """The loop compiles within the deadline of a worker's start; a reset has a shorter deadline."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from embodyrl.envs.libero.factory import FACTORY; from embodyrl.envs.protocol import EnvContext\n"
        "from embodyrl.types import EpisodeStart; from settings import env_of\n"
        "cfg = env_of(env_type='libero', task_suite_name='libero_object', render_profile='lean')\n"
        "compiled = lambda: sorted(path.name for path in Path(os.environ['NUMBA_CACHE_DIR']).rglob('*.nbi'))\n"
        "env = FACTORY.make(cfg, EnvContext(num_envs=1)); before = compiled()\n"
        "env.reset([0], [EpisodeStart(reset_id=60, seed=0, max_episode_steps=9, ignore_terminations=False)])\n"
        "sys.exit(0 if before == compiled() and any('_advance' in name for name in before) else str(before))"
    )
    environ = command_environment(tmp_path, {"NUMBA_CACHE_DIR": str(tmp_path / "cache")})
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=580)


def test_settle_steps_keep_the_gripper_open():
    hold = np.array([[0.0] * 6 + [-1.0]] * 5)
    plain, later = simulator("libero_goal", 7, fast=True), simulator("libero_goal", 7, fast=True, settle_steps=15)
    expected, _ = states(plain, "libero_goal", 7, hold)
    later.reset(install.load_init_states("libero_goal", 7)[3], 7)
    np.testing.assert_array_equal(np.concatenate([later._data.qpos, later._data.qvel, later._data.act]), expected[-1])
    for sim in (plain, later):
        sim.close()


def test_gripper_that_holds_its_position_gets_no_command_while_objects_settle():
    fingers = []
    for settle_open in (True, False):
        sim = simulator("libero_goal", 7, fast=True, settle_open=settle_open)
        sim.reset(install.load_init_states("libero_goal", 7)[3], 7)
        fingers.append(np.ptp(sim._data.qpos[sim._fingers]))
        assert np.array_equal(sim._robot.gripper.current_action, np.zeros(2)) is not settle_open
        sim.close()
    assert fingers[0] > fingers[1]


def test_settle_settings_are_passed_to_the_simulator():
    starts = []
    for keys in ({"settle_steps": 10}, {"settle_steps": 15}, {"settle_gripper": "hold"}):
        cfg = env_of("libero", task_suite_name="libero_goal", render_profile="lean", **keys)
        env = FACTORY.make(cfg, EnvContext(num_envs=1))
        env.reset([0], [EpisodeStart(reset_id=3, seed=0, max_episode_steps=9)])
        seen = np.zeros((1, *env.spec.cameras.size, 3), np.uint8), np.zeros((1, env.spec.state_dim), np.float32)
        env.observe([0], np.repeat(seen[0][None], len(env.spec.cameras.names), axis=1), seen[1])
        starts.append(seen[1])
        env.close()
    assert len(np.unique(np.concatenate(starts), axis=0)) == 3
