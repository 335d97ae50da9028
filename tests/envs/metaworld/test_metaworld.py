"""The MetaWorld adapter against the installed package."""

from __future__ import annotations

import numpy as np
import pytest
from settings import env_of

import embodyrl
from embodyrl.envs.metaworld import factory
from embodyrl.envs.metaworld.factory import FACTORY
from embodyrl.envs.metaworld.settings import BENCHMARKS, TASKS
from embodyrl.envs.protocol import EnvContext
from embodyrl.types import EpisodeStart, ObservationOut

NO_PIXELS = np.zeros((0, 0, 0, 3), np.uint8)


def test_metaworld_groups_match_the_published_tables():
    assert [len(BENCHMARKS[name]) for name in ("easy", "medium", "hard", "very_hard")] == [28, 11, 6, 5]
    assert set(BENCHMARKS["MT50"]) == set(BENCHMARKS["ML45"]) == set(TASKS)
    assert len(BENCHMARKS["MT10"]) == 10


@pytest.mark.parametrize(("key", "value", "said"), [("id", "reach-v2", "reach-v3"), ("id", "MT11", "MT10")])
def test_unknown_task_error_suggests_a_name(key, value, said):
    assert said in FACTORY.validate(env_of("metaworld", **{key: value}))[0]


def _package(name: str, seed: int):
    env_dict = pytest.importorskip("metaworld.env_dict")
    env = env_dict.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{name}-goal-observable"]()
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    env.seed(seed)
    return env


def _bit_equal(name: str, steps: int) -> None:
    env = _package(name, 7)
    ours = FACTORY.make(env_of("metaworld", id=name, pixels=False, use_rel_reward=False), EnvContext(num_envs=1))
    out = ObservationOut(images=NO_PIXELS, state=np.zeros(39, np.float32))
    for start in (3, 7):  # the second episode in a simulator that has played another
        ours.reset([0], [EpisodeStart(reset_id=start, seed=0, max_episode_steps=500, ignore_terminations=True)])
    ours.observe([0], out.images[None], out.state[None])
    np.testing.assert_array_equal(out.state, env.reset()[0].astype(np.float32))
    for action in np.random.default_rng(0).uniform(-1, 1, (steps, 4)).astype(np.float32):
        seen, reward, _, _, info = env.step(action)
        result = ours.step_chunk([0], action[None, None])
        ours.observe([0], out.images[None], out.state[None])
        np.testing.assert_array_equal(out.state, seen.astype(np.float32))
        assert result.reward[0, 0] == np.float32(reward)
        assert result.success[0, 0] == bool(info["success"])
    ours.close()


@pytest.mark.sim
@pytest.mark.parametrize("name", ["reach-v3", "pick-place-v3", "door-open-v3", "bin-picking-v3"])
def test_observations_and_rewards_match_the_package(name):
    _bit_equal(name, 40)


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS))
def test_all_tasks_match_the_package(name):
    _bit_equal(name, 100)


@pytest.mark.sim
def test_an_expert_reaches_the_goal():
    pytest.importorskip("metaworld.policies")
    cfg = env_of("metaworld", id="reach-v3", pixels=False, use_rel_reward=False)
    env = FACTORY.make(cfg, EnvContext(num_envs=1))
    env.reset([0], [EpisodeStart(reset_id=1, seed=0, max_episode_steps=500)])
    _, result = env.expert_chunk([0], 500, noise=0.0)
    assert result.success.any()
    assert result.terminated.any()
    env.close()


@pytest.mark.sim
def test_default_reward_does_not_pay_for_waiting():
    """The expert stops before the goal; the package's sum of rewards would be 237 with and 4,860 without success."""
    pytest.importorskip("metaworld.policies")
    env = embodyrl.make_env("metaworld", "env.id=reach-v3", "env.pixels=false", "env.eval.max_episode_steps=500")
    returns = []
    for active in (500, 25):
        env.reset(options={"reset_id": 7})
        total, over, steps = 0.0, False, 0
        while not over:
            action = env.env._sims.expert(0) if steps < active else np.zeros(4, np.float32)
            _, reward, terminated, truncated, _ = env.step(action)
            total, over, steps = total + float(reward), terminated or truncated, steps + 1
        returns.append((round(total, 1), terminated))
    env.close()
    assert returns == [(1.5, True), (1.0, False)]


@pytest.mark.sim
def test_tasks_solved_at_reset_are_reported(monkeypatch):
    """The second episode's goal is at the hand; the package observes a closed window before opening it."""
    env_dict = pytest.importorskip("metaworld.env_dict")
    reach = FACTORY.make(env_of("metaworld", id="reach-v3", pixels=False), EnvContext(num_envs=2))
    begin = [EpisodeStart(reset_id=state, seed=0, max_episode_steps=5) for state in (3, 4)]
    reach.reset([0, 1], begin)
    assert list(reach.solved_at_reset([0, 1])) == []
    stock = _package("reach-v3", 4)
    stock.reset()
    away, hand = np.array([0.0, 0.8, 0.02]), stock.tcp_center
    drawn = env_dict.ALL_V3_ENVIRONMENTS["reach-v3"]
    monkeypatch.setattr(drawn, "_get_state_rand_vec", lambda env: np.concatenate((away, hand)))
    reach.reset([1], begin[1:])
    assert list(reach.solved_at_reset([0, 1])) == [1]
    monkeypatch.undo()
    reach.reset([1], begin[1:])
    assert list(reach.solved_at_reset([0, 1])) == []
    window = FACTORY.make(env_of("metaworld", id="window-close-v3", pixels=False), EnvContext(num_envs=1))
    window.reset([0], begin[:1])
    assert list(window.solved_at_reset([0])) == []
    for made in (reach, window):
        made.close()


def _play(env, task: int, state: int, env_index: int = 0, action: float | None = None) -> np.ndarray:
    """Return the observation of an environment of several tasks at the start, or after three equal actions."""
    reset_id = env.spec.get_reset_ids(task)[state]
    env.reset([env_index], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=500, ignore_terminations=True)])
    if action is not None:
        env.step_chunk([env_index], np.full((1, 3, 4), action, np.float32))
    out = ObservationOut(images=NO_PIXELS, state=np.zeros(env.spec.state_dim, np.float32))
    env.observe([env_index], out.images[None], out.state[None])
    return out.state


@pytest.mark.sim
def test_parallel_envs_can_change_tasks_in_any_order():
    """Tasks 0 (reach) and 2 (pick-place) of MT10; the simulator of an inactive task keeps its state."""
    pytest.importorskip("metaworld.policies")
    env = FACTORY.make(env_of("metaworld", id="MT10", pixels=False), EnvContext(num_envs=2))
    reach, place = _play(env, 0, 3), _play(env, 2, 3, env_index=1)
    for state, task in ((reach, 0), (place, 2)):
        assert np.flatnonzero(state[39:]).tolist() == [task]
    np.testing.assert_array_equal(_play(env, 2, 3), place)
    np.testing.assert_array_equal(_play(env, 0, 3, env_index=1), reach)
    assert env.instruction(0) == TASKS["pick-place-v3"]
    assert env.expert_chunk([0], 200, noise=0.0)[1].success.any(), "the expert is that of the environment's task"
    alone = FACTORY.make(env_of("metaworld", id="pick-place-v3", pixels=False), EnvContext(num_envs=1))
    np.testing.assert_array_equal(_play(alone, 0, 3), place[:39])
    closed, opened = (_play(alone, 0, 3, action=end) for end in (1.0, -1.0))
    assert alone.spec.action.gripper is not None
    assert (closed[3] - opened[3]) * (alone.spec.action.gripper.closed - alone.spec.action.gripper.open) < 0, (
        "fingers nearer"
    )
    for made in (env, alone):
        made.close()


@pytest.mark.sim
def test_goal_is_hidden_in_ml_benchmarks():
    pytest.importorskip("metaworld.policies")
    shown = FACTORY.make(env_of("metaworld", id="reach-v3", pixels=False), EnvContext(num_envs=1))
    hidden = FACTORY.make(env_of("metaworld", id="ML45", pixels=False), EnvContext(num_envs=1))
    task = BENCHMARKS["ML45"].index("reach-v3")
    seen, blind = _play(shown, 0, 3), _play(hidden, task, 3)
    assert seen[36:].all()
    assert not blind[36:39].any()
    np.testing.assert_array_equal(blind[:36], seen[:36])
    assert hidden.expert_chunk([0], 200, noise=0.0)[1].success.any(), "the expert sees it"
    for made in (shown, hidden):
        made.close()


@pytest.mark.sim
def test_full_images_match_and_lean_images_resemble_the_package():
    env_dict = pytest.importorskip("metaworld.env_dict")
    cameras, shown = ("corner2", "topview"), {}
    for profile in ("full", "lean"):
        params = {"camera_names": [*cameras], "camera_heights": 96, "camera_widths": 128}
        cfg = env_of("metaworld", id="reach-v3", render_profile=profile, init_params=params)
        env = FACTORY.make(cfg, EnvContext(num_envs=1))
        env.reset([0], [EpisodeStart(reset_id=7, seed=0, max_episode_steps=9)])
        out = ObservationOut(images=np.zeros((2, 96, 128, 3), np.uint8), state=np.zeros(4, np.float32))
        env.observe([0], out.images[None], out.state[None])
        shown[profile] = out.images.astype(np.int64)
        assert env.spec.cameras.rotation_deg == 180
        np.testing.assert_array_equal(env.render(0), out.images[0, ::-1, ::-1], err_msg="upright for people")
        env.close()
    for picture, camera in zip(shown["full"], cameras, strict=True):
        stock = env_dict.ALL_V3_ENVIRONMENTS["reach-v3"](
            render_mode="rgb_array", camera_name=camera, height=96, width=128
        )
        stock._set_task_called, stock._freeze_rand_vec, stock.seeded_rand_vec = True, False, True
        stock.model.camera("corner2").pos = (0.75, 0.075, 0.7)
        stock.seed(7)
        seen, _ = stock.reset()
        np.testing.assert_array_equal(stock.render(), picture)
        np.testing.assert_array_equal(out.state, seen[:4].astype(np.float32))
        stock.close()
    assert np.abs(shown["full"] - shown["lean"]).mean() < 15


def test_idle_simulators_of_other_tasks_are_limited(monkeypatch):
    pytest.importorskip("metaworld.policies")
    pytest.importorskip("metaworld")
    monkeypatch.setattr(factory, "_IDLE_BYTES", 3 * factory._SIMULATOR_BYTES[False])
    simulators = FACTORY.simulators(env_of("metaworld", id="MT10", pixels=False), EnvContext(num_envs=2))
    for task in (0, 1, 2, 1):
        for env_index in (0, 1):
            simulators.reset_env(env_index, simulators.spec.get_reset_ids(task).start, 0)
    assert len(simulators._idle_envs) == 3
    assert [task for task, _ in simulators._envs.values()] == [1, 1]
    simulators.close()


def test_memory_estimate_includes_simulators_of_all_tasks():
    """Measured after 400 resets to random tasks: 1143 MiB with 11 environments in a process of 40 MiB."""
    cfg, spec = env_of("metaworld", id="MT10", pixels=False), None
    fixed, per_env = FACTORY.costs(cfg, spec).host_bytes
    assert (40 << 20) + fixed + 11 * per_env == pytest.approx(1143 << 20, rel=0.1)
    single = FACTORY.costs(env_of("metaworld", id="reach-v3", pixels=False), spec).host_bytes
    assert single[1] == per_env / 2
