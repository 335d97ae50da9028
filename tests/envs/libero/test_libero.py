"""The real LIBERO: identity with the benchmark's environment, reproducibility and shared models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.global_state import suppress_output
from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import FACTORY
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import InitParams
from embodyrl.types import EpisodeStart

pytestmark = pytest.mark.sim

STOVE = 7
SIZE = 128
CAMERAS = ["agentview", "robot0_eye_in_hand"]


def spec_of(suite):
    cameras = InitParams(camera_names=CAMERAS, camera_heights=SIZE, camera_widths=SIZE)
    cfg = env_of("libero", task_suite_name=suite, init_params=cameras)
    assert FACTORY.validate(cfg) == []
    spec = FACTORY.spec(cfg, EnvContext())
    install.prepare_process()
    return spec


@pytest.fixture(scope="module")
def roomy():
    """Return an environment with 3 environments whose models all fit into memory."""
    harness = Harness(spec_of("libero_goal"), env_indices=3, max_models=2)
    yield harness
    harness.env.close()


class Harness:
    """An environment and its simulators."""

    def __init__(self, spec, *, env_indices, max_models, lean=False):
        from embodyrl.envs.libero.sims import LiberoSims

        self.spec = spec
        self.sims = LiberoSims(spec, max_models=max_models, lean=lean)
        self.env = ChunkedEnv(self.sims, env_indices, use_rel_reward=True, reward_coef=1.0)

    def start(self, env_index, task, index, seed=7, ignore=True):
        start = EpisodeStart(
            reset_id=self.spec.get_reset_ids(task)[index], seed=seed, max_episode_steps=200, ignore_terminations=ignore
        )
        self.env.reset([env_index], [start])

    def chunk(self, env_index, actions) -> Trace:
        result = self.env.step_chunk([env_index], actions[None])
        images = np.zeros((len(CAMERAS), SIZE, SIZE, 3), np.uint8)
        state = np.zeros(8, np.float32)
        self.env.observe([env_index], images[None], state[None])
        saved = self.sims.pool.use(env_index).save()
        return Trace(images, state, saved.physics, saved.model["site_rgba"], result.success[0], result.reward[0])

    def turn_stove_on(self, env_index):
        open_stove(self.sims.pool.use(env_index)._env)


@dataclass
class Trace:
    images: np.ndarray
    state: np.ndarray
    physics: np.ndarray
    sites: np.ndarray
    success: np.ndarray
    reward: np.ndarray

    def assert_equal(self, other: Trace) -> None:
        for name in ("images", "state", "physics", "sites", "success", "reward"):
            np.testing.assert_array_equal(getattr(self, name), getattr(other, name), err_msg=name, strict=True)


def open_stove(env) -> None:
    """Turn the knob as a successful robot would; all other state is unchanged."""
    env.object_states_dict["flat_stove_1"].set_joint(1.0)


def actions_of(seed, chunks=2, length=4):
    noise = np.random.default_rng(seed).normal(size=(chunks, length, 7)) * 0.5
    # Without a rotation command the controller keeps its former goal, which a swap must not lose.
    noise[:, 0, 3:6] = 0
    return np.clip(noise, -1, 1).astype(np.float32)


def play(harness, env_index, task, index, actions, stove_on_before=None, seed=7):
    harness.start(env_index, task, index, seed)
    traces = []
    for number, chunk in enumerate(actions):
        if number == stove_on_before:
            harness.turn_stove_on(env_index)
        traces.append(harness.chunk(env_index, chunk))
    return traces


def test_suites_declare_tasks_states_and_horizons():
    horizons = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    for suite, horizon in horizons.items():
        spec = FACTORY.spec(env_of("libero", task_suite_name=suite), EnvContext())
        count = 90 if suite == "libero_90" else 10
        assert len(spec.tasks) == count
        assert spec.states_per_task == (50,) * count
        assert spec.num_reset_ids == 50 * count
        assert (spec.max_episode_steps, spec.benchmark.unnorm_key) == (horizon, f"{suite}_no_noops")
        assert (spec.action.dim, spec.state_dim, spec.cameras.rotation_deg) == (7, 8, 180)
        assert (spec.cameras.names, spec.cameras.size) == (("agentview",), (256, 256))
        assert (spec.action.gripper.open, spec.action.gripper.closed, spec.action.gripper.binary) == (-1.0, 1.0, True)
        assert all(len(install.load_init_states(suite, task)) == 50 for task in (0, count - 1))
    assert (
        FACTORY.spec(env_of("libero", task_suite_name="libero_goal"), EnvContext()).tasks[STOVE] == "turn on the stove"
    )
    assert FACTORY.spec(env_of("libero", task_suite_name="libero_10"), EnvContext()).tasks[0] == (
        "put both the alphabet soup and the tomato sauce in the basket"
    )
    assert FACTORY.spec(env_of("libero", task_suite_name="libero_90"), EnvContext()).tasks[0] == (
        "close the top drawer of the cabinet"
    )


def test_rollout_is_bit_identical_to_the_original_environment(roomy):
    from libero.libero.envs import OffScreenRenderEnv

    from embodyrl.envs.libero.rendering import set_linear_colorspace

    index, actions = 3, actions_of(1, chunks=6, length=1)
    ours = play(roomy, 0, STOVE, index, actions, stove_on_before=3)
    assert roomy.env.instruction(0) == "turn on the stove"

    entry = install.get_suite_tasks("libero_goal")[STOVE]
    path = install.get_libero_path("bddl_files") / entry.problem_folder / entry.bddl_file
    with suppress_output():
        stock = OffScreenRenderEnv(
            bddl_file_name=str(path), camera_names=CAMERAS, camera_heights=SIZE, camera_widths=SIZE
        )
        stock.env.object_property_initializers.clear()
        stock.seed(7)
        stock.reset()
    set_linear_colorspace(stock.env.sim._render_context_offscreen)  # the colors of the benchmark's own MuJoCo
    stock.set_init_state(install.load_init_states("libero_goal", STOVE)[index])
    for _ in range(10):
        stock.step([0, 0, 0, 0, 0, 0, -1])
    rewards = []
    for number, (chunk, trace) in enumerate(zip(actions, ours, strict=True)):
        if number == 3:
            open_stove(stock.env)
        obs, reward, done, _ = stock.step(chunk[0])
        rewards.append(reward)
        assert bool(done) == trace.success[0] == (number >= 3)
        for camera, image in zip(CAMERAS, trace.images, strict=True):
            np.testing.assert_array_equal(obs[f"{camera}_image"], image, err_msg=f"step {number} {camera}")
        np.testing.assert_array_equal(stock_proprio(obs), trace.state)
        flat = stock.get_sim_state()
        np.testing.assert_array_equal(flat, trace.physics[: len(flat)])
    assert rewards == [0, 0, 0, 1, 1, 1]
    assert np.concatenate([trace.reward for trace in ours]).tolist() == [0, 0, 0, 1, 0, 0]
    stock.close()


def test_benchmark_success_terminates_the_episode(roomy):
    roomy.start(0, STOVE, 0, ignore=False)
    roomy.turn_stove_on(0)
    result = roomy.env.step_chunk([0], actions_of(1, length=4)[:1])
    assert result.valid.tolist() == result.terminated.tolist() == result.success.tolist() == [[True] + [False] * 3]


def stock_proprio(obs):
    """Return proprioception as in the OpenVLA-OFT evaluation, from the benchmark's observation."""
    from robosuite.utils.transform_utils import quat2axisangle

    parts = [obs["robot0_eef_pos"], quat2axisangle(obs["robot0_eef_quat"].copy()), obs["robot0_gripper_qpos"]]
    return np.concatenate(parts).astype(np.float32)


def test_episodes_are_reproducible_after_other_episodes(roomy):
    actions = actions_of(2)
    first = play(roomy, 0, STOVE, 5, actions, stove_on_before=1)
    play(roomy, 0, STOVE, 6, actions_of(3), stove_on_before=1)
    for env_index in (0, 1):
        for one, two in zip(first, play(roomy, env_index, STOVE, 5, actions, stove_on_before=1), strict=True):
            one.assert_equal(two)
    roomy.start(2, STOVE, 5, seed=8)
    assert (roomy.chunk(2, actions[0]).images != first[0].images).any(), "the seed draws the fixture poses"


def test_repeated_initial_states_are_loaded_bit_for_bit(roomy, monkeypatch):
    from embodyrl.envs.libero import sims
    from embodyrl.envs.libero.simulator import TaskSimulator

    def settle_again(*_):
        raise LookupError

    actions = actions_of(8)
    roomy.sims._settled.clear()
    first = play(roomy, 0, STOVE, 17, actions, stove_on_before=1)
    play(roomy, 1, STOVE, 1, actions_of(9))
    monkeypatch.setattr(TaskSimulator, "reset", settle_again)
    for repeated, expected in zip(play(roomy, 2, STOVE, 17, actions, stove_on_before=1), first, strict=True):
        repeated.assert_equal(expected)
    for index, seed in ((18, 7), (17, 8)):
        with pytest.raises(LookupError):
            roomy.start(0, STOVE, index, seed)
    monkeypatch.undo()
    monkeypatch.setattr(sims, "MAX_SETTLED_STATES", 2)
    roomy.start(0, STOVE, 18)
    assert [key[:2] for key in roomy.sims._settled] == [(STOVE, 1), (STOVE, 18)], "the oldest state is dropped"


def test_seeds_change_settled_states_only_in_tasks_with_random_fixtures(roomy):
    def settle(sims, task, seed):
        simulator = sims.pool.begin(0, task)
        sims._settle(simulator, task, 3, seed)
        state = simulator.save()
        return np.concatenate([state.physics, *(values.ravel() for values in state.model.values())])

    cfg = env_of("libero", task_suite_name="libero_object", render_profile="lean")
    objects = FACTORY.simulators(cfg, EnvContext())
    for sims, task, seeded in ((roomy.sims, STOVE, True), (objects, 0, False)):
        assert (task in sims.spec.seeded_tasks) == seeded
        assert np.array_equal(settle(sims, task, 1), settle(sims, task, 2)) != seeded
    objects.close()


def test_envs_on_a_shared_model_match_envs_with_own_models(roomy):
    first, second = [*actions_of(4, chunks=3)], [*actions_of(5, chunks=3)]
    first[2], second[2] = first[2][:1], second[2][:1]
    alone = [play(roomy, 0, STOVE, 1, first, stove_on_before=1), play(roomy, 1, STOVE, 2, second, seed=9)]
    roomy.start(0, STOVE, 1)
    roomy.start(1, STOVE, 2, seed=9)
    for number in range(3):
        if number == 1:
            roomy.turn_stove_on(0)
        roomy.chunk(0, first[number]).assert_equal(alone[0][number])
        roomy.chunk(1, second[number]).assert_equal(alone[1][number])
    assert len(roomy.sims.pool.loaded) == 1
    assert alone[0][2].success.all()
    assert not alone[1][2].success.any()


def test_swapped_envs_restore_their_full_state(roomy):
    for env_index, task_seed in ((0, 7), (1, 9)):
        roomy.start(env_index, STOVE, env_index, seed=task_seed)
    roomy.turn_stove_on(0)
    roomy.chunk(0, actions_of(9)[0])
    before = dataclasses.asdict(roomy.sims.pool.use(0).save())
    roomy.chunk(1, actions_of(10)[0])
    np.testing.assert_equal(dataclasses.asdict(roomy.sims.pool.use(0).save()), before)
    other = dataclasses.asdict(roomy.sims.pool.use(1).save())
    for name in ("physics", "gripper_command", "model"):
        with pytest.raises(AssertionError):
            np.testing.assert_equal(other[name], before[name], err_msg=f"{name} tells the environments apart")
    assert {*before["own"]} == {"_observed_qpos", "_observed_sites", "_gripper_qpos", "_corruption"}
    for name in ("_observed_qpos", "_observed_sites", "_gripper_qpos"):
        assert (other["own"][name] != before["own"][name]).any(), f"{name} tells the environments apart"


def test_loaded_state_continues_the_episode_exactly(roomy):
    roomy.start(0, STOVE, 0)
    chunks = actions_of(11)
    roomy.chunk(0, chunks[0])
    saved = roomy.env.save(0)
    first = roomy.chunk(0, chunks[1])
    roomy.env.load(0, saved)
    roomy.chunk(0, chunks[1]).assert_equal(first)


@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lean", "full"])
def test_evicted_simulators_reload_and_continue_exactly(lean):
    spec = spec_of("libero_10")
    kitchen, study = 2, 5
    first, second = actions_of(6, chunks=2), actions_of(7, chunks=1)[0]
    wide = Harness(spec, env_indices=2, max_models=2, lean=lean)
    wide.start(0, kitchen, 1)
    wide.start(1, study, 2)
    wide.turn_stove_on(0)
    before, beside, after = wide.chunk(0, first[0]), wide.chunk(1, second), wide.chunk(0, first[1])
    assert len(wide.sims.pool.loaded) == 2
    wide.env.close()

    tight = Harness(spec, env_indices=2, max_models=1, lean=lean)
    tight.start(0, kitchen, 1)
    tight.turn_stove_on(0)
    tight.chunk(0, first[0]).assert_equal(before)
    tight.start(1, study, 2)
    tight.chunk(1, second).assert_equal(beside)
    tight.chunk(0, first[1]).assert_equal(after)
    assert len(tight.sims.pool.loaded) == 1
    tight.env.close()
    tight.env.close()


def test_rendered_frames_are_upright_and_not_mirrored(roomy):
    trace = play(roomy, 0, STOVE, 0, actions_of(8, chunks=1))[0]
    frame = roomy.env.render(0)
    other = np.zeros_like(trace.images)
    roomy.sims.pool.use(0).observe(tuple(reversed(CAMERAS)), other, trace.state)
    np.testing.assert_array_equal(other, trace.images[::-1], err_msg="cameras in the order that is asked for")
    np.testing.assert_array_equal(frame, np.concatenate([image[::-1] for image in trace.images], axis=1))
    gray = frame[:, :SIZE].astype(int).sum(axis=2)
    robot, table = gray[: SIZE // 4, SIZE // 3 : SIZE // 2], gray[-SIZE // 8 :, -SIZE // 4 :]
    assert robot.std() > 3 * table.std(), "the robot stands at the top of the image, the empty table is below"


def test_global_numpy_generator_is_unchanged(roomy):
    np.random.seed(123)
    expected = np.random.random()
    np.random.seed(123)
    roomy.start(0, STOVE, 4)
    assert np.random.random() == expected


def test_sampled_states_match_the_stored_distribution():
    """Sampled states have the spread of placements and joints of the stored states; equal numbers give equal states."""
    cfg = env_of("libero", task_suite_name="libero_object", render_profile="lean", sampled_states=16)
    spec = FACTORY.spec(cfg, EnvContext())
    assert spec.states_per_task == (66,) * 10
    sims = FACTORY.simulators(cfg, EnvContext())
    try:
        simulator, begun = sims.pool.use(0), []
        for seed in (7, 8):
            sims.reset_env(0, spec.get_reset_ids(0)[50], seed)
            begun.append(simulator._data.qpos.copy())
        np.testing.assert_array_equal(*begun, err_msg="no furniture here: the reset id decides, not the seed")
        drawn = np.array([simulator.sample_state(50 + k) for k in range(16)])
        np.testing.assert_array_equal(simulator.sample_state(50), drawn[0])
        stored = np.asarray(install.load_init_states("libero_object", 0))
        assert len(np.unique(drawn[:, 17])) == 16
        assert not np.isin(drawn[:, 17], stored[:, 17]).any()
        moves = stored.std(0) > 1e-6
        np.testing.assert_array_equal(drawn.std(0)[:17] > 1e-6, moves[:17])
        ratio = drawn.std(0)[:54][moves[:54]] / stored.std(0)[:54][moves[:54]]
        assert ((ratio > 0.3) & (ratio < 2.0)).all(), ratio
        np.testing.assert_allclose(drawn.mean(0)[:54], stored.mean(0)[:54], atol=0.03)
    finally:
        sims.close()


@pytest.mark.parametrize("task", [4, 9], ids=["in a drawer", "on a cabinet"])
def test_sampled_states_place_objects_on_fixtures(task):
    """The benchmark's sampler adds the fixture's position to the position of its sites."""
    cfg = env_of("libero", task_suite_name="libero_spatial", render_profile="lean", sampled_states=8)
    spec, sims = FACTORY.spec(cfg, EnvContext()), FACTORY.simulators(cfg, EnvContext())
    try:
        sims.reset_env(0, spec.get_reset_ids(task)[0], 7)
        drawn = np.array([sims.pool.use(0).sample_state(50 + k) for k in range(8)])
        stored = np.asarray(install.load_init_states("libero_spatial", task))
        of_objects = [place + axis for place in range(10, 45, 7) for axis in range(3)]
        np.testing.assert_allclose(drawn.mean(0)[of_objects], stored.mean(0)[of_objects], atol=0.03)
    finally:
        sims.close()
