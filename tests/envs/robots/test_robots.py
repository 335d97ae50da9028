"""Presets of robot environments, and the installed packages against them."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from settings import env_of

from embodyrl.config import compose
from embodyrl.controls import get_controls
from embodyrl.envs.mujoco_rendering import select_headless_backend
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.robots.factory import FACTORY, apply_preset, find_differences
from embodyrl.envs.robots.presets import PIXEL_PRESETS, PRESETS
from embodyrl.errors import ConfigError, EnvError, MissingDependencyError
from embodyrl.plan.config import load_config
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, EpisodeStart

ROBOSUITE = os.environ.get("EMBODYRL_TEST_ROBOSUITE")
"""A Python that has robosuite 1.5."""
WITHOUT_ROBOSUITE = "EMBODYRL_TEST_ROBOSUITE names no Python with robosuite 1.5"


def options() -> dict[str, str]:
    """Return the help line of each option of `env` with a preset."""
    found = {name: one for name, one in compose.variants("env").items() if one[2].get("env_type") == "robots"}
    return {name: one[1] for name, one in found.items()}


def test_each_preset_is_an_option_with_its_install_command():
    about = options()
    assert set(about) == set(PRESETS)
    for name, preset in PRESETS.items():
        assert f"(pip install {preset.package}" in about[name]
        assert f"{preset.horizon} steps" in about[name]
        assert ("env.pixels=true" in about[name]) == (name in PIXEL_PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_each_env_option_has_the_time_limit_of_its_preset(name: str):
    env = load_config("check-env", [f"env={name}"]).env
    assert env.title == name
    assert {env.train.max_episode_steps, env.eval.max_episode_steps} == {PRESETS[name].horizon}
    assert env.gym.id == PRESETS[name].id


def test_banner_shows_action_meaning_rate_and_success_criterion_of_a_preset():
    lines = FACTORY.get_banner_lines(load_config("check-env", ["env=pusht"]).env)
    assert lines == [
        (
            "robot",
            "Target position of the agent, in pixels of a 512 x 512 square · 10 actions/s · success: coverage of the "
            "target above 95 %",
        )
    ]


def test_keys_override_the_arguments_of_a_preset():
    words = ["env=pusht", "env.kwargs.block_cog=[0,1]", "env.instruction=Push."]
    gym = load_config("check-env", words).env.gym
    assert gym.kwargs == {"obs_type": "state", "block_cog": [0, 1]}
    assert gym.instruction == "Push."


def test_preset_supports_an_observation_history():
    env = load_config("check-env", ["env=pusht", "env.history=2"]).env
    assert (env.history, env.gym.id, env.title) == (2, PRESETS["pusht"].id, "pusht")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=pusht", "env.robot=pushd"], "Did you mean 'pusht'"),
        (["env=fetch_reach", "env.pixels=true"], "fetch_reach has no images"),
        (["env=pusht", "env.python=/usr/bin/python3"], "Remove env.python"),
        (["env=robosuite_lift", "env.kwargs.python=/usr/bin/python3"], "set env.python instead"),
        (["env=pusht", "env.id=CartPole-v1"], "env.id is set by env.robot"),
    ],
)
def test_unusable_keys_of_a_preset_are_rejected(words: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        load_config("check-env", words)


def test_all_differences_between_preset_and_package_are_reported():
    preset = PIXEL_PRESETS["pusht"]
    same = EnvSpec(
        name="x",
        action=ActionSpec(dim=2),
        tasks=("x",),
        states_per_task=(1,),
        cameras=CameraSpec(names=("pixels",), size=(96, 96)),
        state_dim=2,
        max_episode_steps=300,
    )
    assert find_differences(preset, same) == []
    other = replace(same, action=ActionSpec(dim=3), cameras=CameraSpec(), state_dim=5, max_episode_steps=200)
    assert [text.partition(", expected")[0] for text in find_differences(preset, other)] == [
        "cameras: ()",
        "state columns: 5",
        "action dimensions: 3",
        "time limit: 200",
    ]


def test_only_an_unchanged_environment_is_compared_with_its_preset():
    spec = EnvSpec(
        name="x", action=ActionSpec(dim=2), tasks=("x",), states_per_task=(1,), state_dim=5, max_episode_steps=100
    )
    with pytest.raises(EnvError, match="time limit: 100, expected 300"):
        apply_preset(env_of("robots", robot="pusht"), spec)
    for keys in ({"kwargs": {"max_episode_steps": 100}}, {"success_key": "won"}):
        assert apply_preset(env_of("robots", robot="pusht", **keys), spec).name == "pusht"


def test_missing_package_error_names_the_install_command():
    try:
        import gym_pusht  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match="pip install gym-pusht"):
            FACTORY.spec(env_of("robots", robot="pusht"), EnvContext())
    else:
        pytest.skip("gym-pusht is installed")


@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "pixels"),
    [(name, pixels) for pixels in (False, True) for name in (PIXEL_PRESETS if pixels else PRESETS)],
)
def test_installed_package_matches_its_preset(name: str, pixels: bool):
    preset = (PIXEL_PRESETS if pixels else PRESETS)[name]
    if preset.process and ROBOSUITE is None:
        pytest.skip(WITHOUT_ROBOSUITE)
    if not preset.process and importlib.util.find_spec(preset.module) is None:
        pytest.skip(f"{preset.package} is not installed")
    python = ROBOSUITE if preset.process else None
    cfg = env_of("robots", robot=name, pixels=pixels, python=python, use_rel_reward=False)
    spec = FACTORY.spec(cfg, EnvContext(renders_images=False))
    assert (spec.name, spec.state_dim, spec.cameras.names) == (name, sum(preset.state.values()), preset.cameras)
    assert (spec.max_episode_steps, spec.tasks) == (preset.horizon, (preset.instruction,))
    assert spec.goal is None or name.startswith(("fetch", "hand", "maze"))
    assert get_controls(spec.action)[0].label == f"{preset.action[0]} -"


@pytest.mark.sim
@pytest.mark.parametrize("task", ["TransferCube", "Insertion"])
def test_aloha_matches_the_package(task: str):
    """States, rewards and the camera image, although only the observed camera is rendered."""
    select_headless_backend()  # before dm_control, which reads the choice when it is imported
    pytest.importorskip("gym_aloha")
    from embodyrl.envs.robots.aloha import AlohaEnv

    theirs = gymnasium.make(f"gym_aloha/Aloha{task}-v0", obs_type="pixels_agent_pos")
    name = {"TransferCube": "transfer_cube"}.get(task, "insertion")
    ours = [AlohaEnv(name), AlohaEnv(name, camera="top")]
    expected, _ = theirs.reset(seed=3)
    seen = [env.reset(seed=3)[0] for env in ours]
    theirs.action_space.seed(0)
    for step in range(4):
        for one in seen:
            np.testing.assert_array_equal(one["agent_pos"], expected["agent_pos"])
        np.testing.assert_array_equal(seen[1]["pixels"]["top"], expected["pixels"]["top"])
        if step == 3:
            break
        action = theirs.action_space.sample()
        expected, reward, *_ = theirs.step(action)
        results = [env.step(action) for env in ours]
        seen = [result[0] for result in results]
        assert [result[1] for result in results] == [reward, reward]


@pytest.mark.sim
def test_aloha_joint_targets_are_limited_by_the_joints():
    """gym-aloha declares -1..1, which excludes the initial angle of the elbow."""
    select_headless_backend()
    pytest.importorskip("gym_aloha")
    from embodyrl.envs.robots.aloha import AlohaEnv

    space = AlohaEnv("insertion").action_space
    assert space.contains(np.array([0, -0.96, 1.16, 0, -0.3, 0, 1] * 2, np.float32))
    assert not space.contains(np.array([0, -0.96, 1.7, 0, -0.3, 0, 1] * 2, np.float32))


@pytest.mark.sim
def test_unstable_aloha_simulation_ends_the_episode_without_success():
    select_headless_backend()
    pytest.importorskip("gym_aloha")
    from embodyrl.envs.robots.aloha import AlohaEnv

    env = AlohaEnv("transfer_cube")
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(300):
        seen, reward, terminated, _, info = env.step(env.action_space.sample())
        if terminated:
            break
    assert (terminated, reward, info) == (True, 0.0, {"is_success": False})
    assert env.observation_space.contains(seen)
    env.reset(seed=0)
    assert not env.step(env.action_space.sample())[2]


@pytest.mark.sim
@pytest.mark.parametrize("robot", ["aloha_transfer_cube", "aloha_insertion"])
def test_aloha_expert_solves_its_task_and_is_deterministic(robot: str):
    select_headless_backend()
    pytest.importorskip("gym_aloha")
    cfg = env_of("robots", robot=robot, use_rel_reward=False)
    chunks = []
    for env in (FACTORY.make(cfg, EnvContext(renders_images=False)) for _ in range(2)):
        assert env.spec.expert.tasks == (0,)
        for reset_id in (0, 95_001):
            env.reset([0], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=300)])
            actions, result = env.expert_chunk([0], 300, noise=0.0)
            assert result.success.any()
            assert result.reward.max() == 4
            chunks.append(actions)
        env.close()
    np.testing.assert_array_equal(chunks[:2], chunks[2:])


@pytest.mark.sim
def test_aloha_expert_grasps_a_dropped_cube_again():
    select_headless_backend()
    pytest.importorskip("gym_aloha")
    from embodyrl.envs.robots.aloha import AlohaEnv

    env = AlohaEnv("transfer_cube")
    env.reset(seed=0)
    lifted, success, steps = False, False, 0
    while not success and steps < 600:
        action = env.expert_action()
        reward = env.step(action)[1]
        if reward == 2 and not lifted:
            lifted = True
            for _ in range(20):
                env.step(np.append(action[:-1], 1.0))
        success, steps = reward == 4, steps + 1
    assert (lifted, success) == (True, True)


@pytest.mark.sim
def test_cube_positions_of_gym_hil_depend_on_the_reset_id():
    select_headless_backend()
    pytest.importorskip("gym_hil")
    env = FACTORY.make(env_of("robots", robot="hil_pick_cube", use_rel_reward=False), EnvContext(renders_images=False))
    state = np.zeros((3, 21), np.float32)
    for row, reset_id in enumerate((1, 2, 1)):
        env.reset([0], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=100)])
        env.observe([0], np.zeros((1, 0, 0, 0, 3), np.uint8), state[row : row + 1])
    env.close()
    np.testing.assert_array_equal(state[0], state[2])
    assert np.abs(state[0, -3:] - state[1, -3:]).max() > 0.01


@pytest.mark.integration
@pytest.mark.parametrize(
    ("python", "said"), [(None, "set env.python to the bin/python"), ("/no/such", "cannot be started")]
)
def test_python_without_robosuite_is_reported(python: str | None, said: str):
    """The other simulators use robosuite 1.4, which is rejected as well."""
    with pytest.raises(MissingDependencyError, match=said):
        FACTORY.spec(env_of("robots", robot="robosuite_lift", python=python), EnvContext(renders_images=False))


@pytest.mark.sim
@pytest.mark.skipif(ROBOSUITE is None, reason=WITHOUT_ROBOSUITE)
@pytest.mark.parametrize("name", ["lift", "stack", "door"])
def test_robosuite_expert_solves_its_task(name: str):
    cfg = env_of("robots", robot=f"robosuite_{name}", python=ROBOSUITE, use_rel_reward=False)
    env = FACTORY.make(cfg, EnvContext(renders_images=False))
    for reset_id in range(3):
        env.reset([0], [EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=150)])
        _, result = env.expert_chunk([0], 150, noise=0.0)
        assert result.success.any()
        assert result.terminated.any()
    env.close()
