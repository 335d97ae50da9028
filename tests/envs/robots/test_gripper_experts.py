"""Scripted experts for Fetch, HandReach and the cube of gym-hil."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.mujoco_rendering import select_headless_backend
from embodyrl.envs.protocol import Env, EnvContext
from embodyrl.envs.robots.factory import FACTORY
from embodyrl.envs.robots.presets import PRESETS
from embodyrl.types import EpisodeStart

pytestmark = pytest.mark.sim
STEPS = 50


def built(name: str, *wrappers: str) -> Env:
    select_headless_backend()
    if importlib.util.find_spec(PRESETS[name].module) is None:
        pytest.skip(f"{PRESETS[name].package} is not installed")
    return FACTORY.make(
        env_of("robots", robot=name, wrappers=[*wrappers], use_rel_reward=False), EnvContext(renders_images=False)
    )


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("fetch_push", 0.0),
        ("fetch_push", 0.3),
        ("fetch_pick_and_place", 0.0),
        ("fetch_pick_and_place", 0.3),
        ("hand_reach", 0.0),
    ],
)
def test_goal_expert_reaches_the_goal(name: str, noise: float):
    env, reached = built(name), []
    for reset_id in range(5):
        env.reset([0], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=STEPS)])
        _, result = env.expert_chunk([0], STEPS, noise=noise)
        reached.append(bool(result.success.any()))
    env.close()
    assert reached == [True] * 5


def test_panda_expert_lifts_the_cube_and_ends_the_episode():
    env = built("hil_pick_cube")
    for reset_id in range(3):
        env.reset([0], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=STEPS)])
        _, result = env.expert_chunk([0], STEPS, noise=0.0)
        assert result.success.any()
        assert result.terminated.any()
    env.close()


def test_panda_actions_are_position_steps_and_a_gripper_command():
    """The base environment reads changes in meters of up to 1 m; rotations have no effect."""
    pytest.importorskip("gym_hil")
    from embodyrl.envs.gym.create import create

    select_headless_backend()
    cfg = env_of("robots", robot="hil_pick_cube", use_rel_reward=False).gym
    env = create(cfg, cfg.kwargs)
    env.reset(seed=0)
    data = env.unwrapped.data
    before = data.mocap_pos[0].copy()
    assert env.action_space.shape == (4,)
    env.step(np.array([1.0, -1.0, 0.5, 0.4], np.float32))
    np.testing.assert_allclose(data.mocap_pos[0] - before, [0.025, -0.025, 0.0125], atol=1e-7)
    np.testing.assert_allclose(env.unwrapped.get_gripper_pose(), [0.4 * 255], rtol=1e-5)
    env.close()


@pytest.mark.parametrize("name", ["fetch_push", "fetch_pick_and_place", "hil_pick_cube", "hand_reach"])
def test_expert_actions_are_deterministic_and_within_the_action_space(name: str):
    chunks = []
    for env in (built(name), built(name)):
        env.reset([0], [EpisodeStart(reset_id=95_000, seed=0, max_episode_steps=STEPS)])
        chunks.append(env.expert_chunk([0], 15, noise=0.0)[0])
        env.close()
    np.testing.assert_array_equal(*chunks)
    assert np.abs(chunks[0]).max() <= 1


def test_pick_expert_grasps_a_dropped_block_again():
    """The fingers are opened for five steps after the block was lifted by 5 cm."""
    pytest.importorskip("gymnasium_robotics")
    import gymnasium

    from embodyrl.envs.robots.fetch import FetchPickExpert

    env = FetchPickExpert(gymnasium.make("gymnasium_robotics:FetchPickAndPlace-v4", max_episode_steps=150))
    seen, _ = next(start for start in (env.reset(seed=seed) for seed in range(50)) if start[0]["desired_goal"][2] > 0.6)
    opened, info = 0, {"is_success": 0.0}
    for _ in range(100):
        action = env.expert_action()
        if seen["achieved_goal"][2] > 0.475 or 0 < opened < 5:
            opened += opened < 5
            action[3] = 1.0 if opened < 5 else action[3]
        seen, _, _, _, info = env.step(action)
    env.close()
    assert opened == 5
    assert info["is_success"] == 1.0
