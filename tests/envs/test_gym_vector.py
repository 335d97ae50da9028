"""Natively vectorized environments: each environment matches a single environment."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from settings import env_of

from embodyrl.commands.train import train
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.types import EpisodeStart


class CartPoles(SyncVectorEnv):
    """A real vector environment that takes reset masks."""

    def __init__(self, num_envs: int, mode: AutoresetMode = AutoresetMode.DISABLED) -> None:
        super().__init__([lambda: gymnasium.make("CartPole-v1")] * num_envs, autoreset_mode=mode)


class NextStep(CartPoles):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, AutoresetMode.NEXT_STEP)


class SameStep(CartPoles):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, AutoresetMode.SAME_STEP)


def shorter(**arguments) -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=17, **arguments)


class SharesObservationMemory(SyncVectorEnv):
    """Environment that writes every observation into the same memory."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([shorter] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)


def apart(num_envs: int) -> AsyncVectorEnv:
    """Run each environment in a separate process."""
    makers = [lambda: gymnasium.make("CartPole-v1")] * num_envs
    return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


class ReportsLean(gymnasium.Wrapper):
    """Environment that reports at each step whether the pole leans to the right."""

    def step(self, action):
        seen, reward, terminated, truncated, info = self.env.step(action)
        success = bool(seen[2] > 0)
        return seen, reward, terminated, truncated, info | {"success": success, "nested": {"success": success}}


def telling(**arguments) -> ReportsLean:
    return ReportsLean(gymnasium.make("CartPole-v1", **arguments))


class TellingBatch(SyncVectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__([telling] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class CannotClose(CartPoles):
    def close_extras(self, **arguments) -> None:
        raise RuntimeError("the simulators are gone")


def three() -> CartPoles:
    return CartPoles(3)


gymnasium.register("test/CartPoles-v0", vector_entry_point=CartPoles)


def config(env_id: str) -> EnvSettings:
    return env_of(env_type="gym", id=env_id, use_rel_reward=False)


def play(env_id: str) -> list[np.ndarray]:
    """Return rewards, flags and observations of three environments whose episodes end and start at different times."""
    env = ENVS.get("gym").make(config(env_id), EnvContext(num_envs=3))
    state = np.zeros((3, 4), np.float32)
    images = np.zeros((len(state), 0, 0, 0, 3), np.uint8)
    draw, next_id, seen = np.random.default_rng(0), 3, []

    def start(reset_id: int) -> EpisodeStart:
        return EpisodeStart(reset_id=reset_id, seed=0, max_episode_steps=19)

    env.reset([0, 1, 2], [start(i) for i in range(3)])
    for _ in range(30):
        result = env.step_chunk([0, 1, 2], draw.integers(0, 2, (3, 4, 1)).astype(np.float32))
        env.observe([0, 1, 2], images, state)
        seen += [result.reward, result.valid, result.terminated, result.truncated, result.success, state.copy()]
        for env_index in np.flatnonzero(result.done).tolist():
            env.reset([env_index], [start(next_id)])
            next_id += 1
        env.observe([0, 1, 2], images, state)
        seen.append(state.copy())
    env.close()
    assert next_id > 12
    return seen


VECTORS = [f"test_gym_vector:{name}" for name in ("CartPoles", "NextStep", "SameStep", "apart")]


@pytest.mark.parametrize("env_id", [*VECTORS, "test/CartPoles-v0"])
def test_vector_environment_matches_single_environments(env_id):
    for ours, single in zip(play(env_id), play("CartPole-v1"), strict=True):
        np.testing.assert_array_equal(ours, single)


def test_final_observation_is_not_overwritten():
    for ours, single in zip(
        play("test_gym_vector:SharesObservationMemory"), play("test_gym_vector:shorter"), strict=True
    ):
        np.testing.assert_array_equal(ours, single)


def test_success_of_a_finished_episode_is_kept():
    batch = play("test_gym_vector:TellingBatch")
    for ours, single in zip(batch, play("test_gym_vector:telling"), strict=True):
        np.testing.assert_array_equal(ours, single)
    flags = [part for part in batch if part.dtype == np.bool_ and part.shape == (3, 4)]
    terminated, success = np.stack(flags[1::4]), np.stack(flags[3::4])
    assert len(np.unique(success[terminated])) == 2, "both outcomes, or this shows little"


def test_env_without_an_action_keeps_its_state_in_lockstep():
    env = ENVS.get("gym").make(config("test_gym_vector:CartPoles"), EnvContext(num_envs=2))
    state = np.zeros((2, 4), np.float32)
    images = np.zeros((len(state), 0, 0, 0, 3), np.uint8)
    env.reset([0, 1], [EpisodeStart(reset_id=i, seed=0, max_episode_steps=50) for i in (5, 6)])
    env.observe([0, 1], images, state)
    before = state.copy()
    env.step_chunk([0], np.ones((1, 3, 1), np.float32))
    env.observe([0, 1], images, state)
    assert not np.array_equal(state[0], before[0])
    np.testing.assert_array_equal(state[1], before[1])


def test_finished_episode_keeps_its_final_observation():
    """A pole pushed to one side falls four times during one chunk of its neighbour."""
    env = ENVS.get("gym").make(config("test_gym_vector:SameStep"), EnvContext(num_envs=2))
    state, images = np.zeros((2, 4), np.float32), np.zeros((2, 0, 0, 0, 3), np.uint8)
    actions = np.zeros((2, 40, 1), np.float32)
    actions[1, ::2] = 1.0
    env.reset([0, 1], [EpisodeStart(reset_id=i, seed=0, max_episode_steps=50) for i in (5, 6)])
    result = env.step_chunk([0, 1], actions)
    assert result.valid.sum(axis=1).tolist()[0] < 12
    assert result.valid.sum(axis=1).tolist()[1] > 24
    env.observe([0, 1], images, state)
    env.close()
    single = gymnasium.make("CartPole-v1")
    single.reset(seed=5)
    for _ in range(int(result.valid[0].sum())):
        seen, _, terminated, _, _ = single.step(0)
    assert terminated
    np.testing.assert_array_equal(state[0], seen)


def test_vector_environment_passes_check_env():
    from embodyrl.envs.check import check_env

    findings = list(check_env(config("test_gym_vector:CartPoles")))
    assert {finding.level for finding in findings} == {"ok"}, findings


def test_vector_environment_of_another_size_is_rejected():
    with pytest.raises(ConfigError, match="of 3 environments, expected num_envs=2"):
        ENVS.get("gym").make(config("test_gym_vector:three"), EnvContext(num_envs=2))


def test_vector_environment_without_partial_reset_is_rejected():
    with pytest.raises(ConfigError, match=r"CartPoleVectorEnv.*resets all environments together.*Fix: "):
        ENVS.get("gym").spec(config("gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"), EnvContext())


WORDS = (
    *("experiment=cartpole", "env.train.total_num_envs=4"),
    *("runner.max_steps=2", "runner.val_check_interval=2", "eval.episodes=12"),
)


def rows(folder, *words):
    places = (f"runner.output_dir={folder}", "runner.logger.backends=[jsonl]")
    run = train(load_config("train", [*WORDS, *places, *words])).run
    lines = (run / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in lines.splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and "per_s" not in k} for row in found]


@pytest.mark.integration
@pytest.mark.parametrize("vector", ["CartPoles", "NextStep", "SameStep"])
def test_training_on_vector_and_single_environments_agrees(tmp_path, vector):
    """Episodes are longer than a rollout of 8 steps, and continue in the next training step."""
    rollouts = ("env.train.max_steps_per_rollout_epoch=8", "env.train.continue_episodes=true", "runner.max_steps=6")
    words = (*rollouts, "runner.deterministic=true", "rollout.pipeline_stage_num=1", "runner.val_check_interval=6")
    one, other = (
        rows(tmp_path / name, *words, f"env.id={env_id}")
        for name, env_id in (("single", "CartPole-v1"), ("batch", f"test_gym_vector:{vector}"))
    )
    assert one == other
    assert one[-1]["eval/episodes"] == 12
    assert max(row.get("train/episode_len") or 0 for row in one) > 8


def test_vector_environment_rejects_pipeline_stages():
    cfg = load_config("train", [*WORDS, "env.id=test_gym_vector:CartPoles", "rollout.pipeline_stage_num=2"])
    with pytest.raises(ConfigError, match=r"steps all environments of a worker at once.*set it to 1"):
        build_run_plan(cfg, training=True)


def test_failing_close_of_a_vector_environment_is_logged(caplog):
    env = ENVS.get("gym").make(config("test_gym_vector:CannotClose"), EnvContext(num_envs=2))
    env.close()
    assert "failed: RuntimeError: the simulators are gone" in caplog.text


def test_info_is_split_by_env():
    """Poles pushed to the left and to the right differ."""
    env = ENVS.get("gym").make(config("test_gym_vector:TellingBatch"), EnvContext(num_envs=2))
    env.reset([0, 1], [EpisodeStart(reset_id=i, seed=0, max_episode_steps=9) for i in range(2)])
    env.step_chunk([0, 1], np.repeat([[[0.0]], [[1.0]]], 5, axis=1).astype(np.float32))
    infos = [env._sims.info(env_index) for env_index in range(2)]
    assert [bool(info["success"]) for info in infos] == [True, False]
    assert [info["nested"] for info in infos] == [{"success": True}, {"success": False}]
    env.close()


class Numbered(gymnasium.Env):
    """Environment of three steps that counts its steps in image and info."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode, steps = "rgb_array", 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {"steps": 0}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 3, False, {"steps": self.steps}

    def render(self):
        return np.full((4, 4, 3), self.steps, np.uint8)


def numbered(num_envs: int, mode: str = "DISABLED") -> SyncVectorEnv:
    return SyncVectorEnv([Numbered] * num_envs, autoreset_mode=AutoresetMode[mode])


@pytest.mark.parametrize("mode", ["DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_final_step_of_an_episode_is_reported_and_rendered(mode):
    """The final frame is not the first frame of the next episode; same-step resets cannot render the final frame."""
    cfg = config("test_gym_vector:numbered").updated({"kwargs": {"mode": mode}})
    env = ENVS.get("gym").make(cfg, EnvContext(num_envs=2))
    told, filmed = [], []

    def after_step(env_index: int, success: bool) -> None:
        told.append((env_index, env._sims.info(env_index)["steps"]))
        filmed.append((env_index, int(env.render(env_index).max())))

    expected = []
    for offset in (0, 1):  # one begins a step later than the other, and the second time the other way round
        env.reset([offset], [EpisodeStart(reset_id=1, seed=0, max_episode_steps=9)])
        env.step_chunk([offset], np.zeros((1, 1, 1), np.float32), after_step=after_step)
        expected.append((offset, 1))
        env.reset([1 - offset], [EpisodeStart(reset_id=2, seed=0, max_episode_steps=9)])
        env.step_chunk([offset, 1 - offset], np.zeros((2, 4, 1), np.float32), after_step=after_step)
        expected += [(offset, 2), (1 - offset, 1), (offset, 3), (1 - offset, 2), (1 - offset, 3)]
    env.close()
    assert told == expected
    assert filmed == [(env_index, steps % 3 if mode == "SAME_STEP" else steps) for env_index, steps in expected]
