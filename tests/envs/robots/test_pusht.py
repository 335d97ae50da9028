"""The scripted expert of PushT: success, determinism, and reaction to other policies' actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from settings import env_of

from embodyrl.cli.main import main
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.robots.factory import FACTORY

pytestmark = pytest.mark.sim


def episode(seed: int, noise: float = 0.0, steps: int = 300) -> tuple[np.ndarray, float]:
    """Run the expert with Gaussian noise on its actions; return all actions and the last coverage of the target."""
    pytest.importorskip("gym_pusht")
    import gymnasium

    from embodyrl.envs.robots.pusht import PushTExpert

    env = PushTExpert(gymnasium.make("gym_pusht/PushT-v0", obs_type="state"))
    rng, actions, info = np.random.default_rng(seed), [], {"coverage": 0.0}
    env.reset(seed=seed)
    for _ in range(steps):
        actions.append(env.expert_action())
        executed = np.clip(actions[-1] + rng.normal(0, noise, 2), 0, 512)
        _, _, terminated, _, info = env.step(executed.astype(np.float32))
        if terminated:
            break
    env.close()
    return np.array(actions), info["coverage"]


@pytest.mark.parametrize(("seed", "noise"), [(95_000, 0.0), (95_002, 2.0)])
def test_expert_covers_the_target(seed: int, noise: float):
    assert episode(seed, noise)[1] > 0.95


def test_pusht_expert_rarely_stops_moving():
    """Stops depend on pixels that a policy cannot imitate: it would stop a few pixels away and never push."""
    gymnasium, _ = pytest.importorskip("gymnasium"), pytest.importorskip("gym_pusht")

    from embodyrl.envs.robots.pusht import PushTExpert

    env = PushTExpert(gymnasium.make("gym_pusht/PushT-v0", obs_type="state"))
    env.reset(seed=95_003)
    speeds, terminated = [], False
    while not terminated and len(speeds) < 300:
        _, _, terminated, _, info = env.step(env.expert_action())
        speeds.append(np.linalg.norm(info["vel_agent"]))
    env.close()
    assert np.mean(np.array(speeds) < 20.0) < 0.08  # pixels/s


def test_expert_is_deterministic():
    (first, _), (second, _) = episode(95_003, steps=60), episode(95_003, steps=60)
    np.testing.assert_array_equal(first, second)


def test_simulated_push_predicts_the_motion_of_the_block():
    """The table's motion, from another pose of the block, equals the motion in gym-pusht."""
    push_env = pytest.importorskip("gym_pusht.envs").PushTEnv
    from embodyrl.envs.robots.pusht_pushes import PushTable, rotation

    table, pose = PushTable(), np.array([250.0, 200.0, 2.0])
    contact, depth = 8, 20
    start = rotation(pose[2]) @ table.starts[contact] + pose[:2]
    direction = rotation(pose[2]) @ table.directions[contact]
    moved = table.motions[contact, depth]
    env = push_env(obs_type="state")
    env.reset(seed=0)
    env.agent.position, env.agent.velocity = tuple(start), (0.0, 0.0)
    env.block.angle, env.block.position = pose[2], tuple(pose[:2])
    end = start + direction * table.lengths[depth]
    steps = np.linspace(0, 1, 20)[:, None] * (end - start) + start
    for target in [*steps, *[end] * 10]:
        env.step(target)
    expected = np.array([*(rotation(pose[2]) @ moved[:2] + pose[:2]), pose[2] + moved[2]])
    np.testing.assert_allclose([*env.block.position, env.block.angle], expected, atol=0.5)
    assert abs(moved[2]) > 0.3


def test_block_frame_displaces_the_target_position_in_the_rotated_frame():
    """A block at (250, 250), rotated by 90 degrees: its x axis is the window's y axis."""
    pytest.importorskip("gym_pusht")
    import gymnasium

    from embodyrl.envs.robots.pusht import BlockFrame, PushTExpert

    env: Any = BlockFrame(PushTExpert(gymnasium.make("gym_pusht/PushT-v0", obs_type="state")))
    env.reset(seed=0)
    state = env.unwrapped
    state.block.angle, state.block.position = np.pi / 2, (250.0, 250.0)
    state.agent.position, state.agent.velocity = (420.0, 420.0), (0.0, 0.0)
    seen, *_ = env.step(np.array([0.0, -50.0], np.float32))
    moved = state.agent.position[0] - 420.0
    assert 5 < moved < 50
    assert abs(state.agent.position[1] - 420.0) < 1e-4
    np.testing.assert_allclose(seen[:2], [170.0, -(170.0 + moved)], atol=1e-4)
    np.testing.assert_allclose(seen[4:], [6.0, -6.0, np.sqrt(0.5), -np.sqrt(0.5)], atol=1e-6)
    # The first push begins where the planner expects the agent, in either frame.
    expected = env.env.expert_action() - np.array(state.agent.position)
    np.testing.assert_allclose(env.expert_action(), [expected[1], -expected[0]], atol=1e-3)


@pytest.mark.parametrize("name", ["pusht", "pusht_relative"])
def test_pusht_presets_have_a_scripted_expert(name: str):
    pytest.importorskip("gym_pusht")
    cfg = env_of("robots", robot=name, use_rel_reward=False)
    assert FACTORY.spec(cfg, EnvContext(renders_images=False)).expert.tasks == (0,)


@pytest.mark.integration
def test_included_policy_pushes_the_block_most_of_the_way(tmp_path: Path):
    """The initial policy of `experiment=pusht_diffusion`; last coverage on validation states: 0.75."""
    pytest.importorskip("gym_pusht")
    words = "eval env=pusht_relative model=diffusion model.path=assets/diffusion_pusht_start model.num_action_chunks=2"
    keys = "env.use_rel_reward=true eval.episodes=8 env.eval.total_num_envs=8 env.eval.state_ids=[90000,94999]"
    out = [f"runner.output_dir={tmp_path}", "runner.experiment_name=start", "launcher=inline", "video=none"]
    assert main([*words.split(), *keys.split(), *out]) == 0
    found = json.loads((tmp_path / "start/eval/step_000000/eval.json").read_text())
    assert found["overall"]["mean_return"] > 0.5
