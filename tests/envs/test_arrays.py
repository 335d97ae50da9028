"""Array-based simulators match single simulators and can be trained on."""

from __future__ import annotations

import numpy as np
import pytest
from settings import env_of
from toy_runs import running_crew

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.factory import SimFactory
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.reward import RewardMode, RewardStep, StepRewardSettings
from embodyrl.envs.settings import EnvSettings, RewardSettings
from embodyrl.envs.simulators import SimSteps, Simulators
from embodyrl.errors import EnvError
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, EpisodeStart, FloatArray, IntArray, RewardSpec

SPEC = EnvSpec(
    name="cartpoles",
    action=ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(2,)),
    tasks=("left start", "right start"),
    states_per_task=(100, 50),
    state_dim=4,
    max_episode_steps=500,
    reward=RewardSpec(reports_success=False),
)


class CartPoles(Simulators):
    """CartPole in numpy; the initial state is Gymnasium's for the seed, which is the reset id."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(SPEC)
        self.state = np.zeros((num_envs, 4))

    def reset(self, env_indices: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        from gymnasium.utils import seeding  # heavy, as simulators are: the driver imports this module

        draws = [seeding.np_random(int(i))[0].uniform(-0.05, 0.05, 4) for i in reset_ids]
        self.state[env_indices] = draws

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        x, v, angle, w = self.state[env_indices].T
        force = np.where(actions[:, 0] > 0.5, 10.0, -10.0)
        push = (force + 0.05 * np.square(w) * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4.0 / 3.0 - 0.1 * np.square(np.cos(angle)) / 1.1))
        speed = push - 0.05 * turn * np.cos(angle) / 1.1
        self.state[env_indices] = np.stack([x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * w, w + 0.02 * turn], 1)
        fell = (np.abs(self.state[env_indices, 0]) > 2.4) | (np.abs(self.state[env_indices, 2]) > 12 * 2 * np.pi / 360)
        never = np.zeros(len(env_indices), np.bool_)
        return SimSteps(reward=np.ones(len(env_indices), np.float32), terminated=fell, success=never, truncated=never)

    def observe(self, env_indices: IntArray, images: np.ndarray, state: FloatArray, rows: IntArray) -> None:
        state[rows] = self.state[env_indices]


class CartPoleSettings(EnvSettings, RewardSettings):
    """Settings without additional keys."""


class CartPoleFactory(SimFactory[CartPoleSettings]):
    settings = CartPoleSettings

    def describe(self, cfg: CartPoleSettings, context: EnvContext) -> EnvSpec:
        return SPEC

    def simulators(self, cfg: CartPoleSettings, context: EnvContext) -> CartPoles:
        return CartPoles(context.num_envs)


FACTORY = CartPoleFactory()


def lean(step: RewardStep) -> float:
    return -float(abs(step.observation.state[2]))


def make(env_indices: int, **values) -> ChunkedEnv:
    return ChunkedEnv(CartPoles(env_indices), env_indices, **({"use_rel_reward": False, "reward_coef": 1.0} | values))


def begin(env: ChunkedEnv, ids: list[int], limit: int = 100) -> None:
    env.reset(range(len(ids)), [EpisodeStart(reset_id=i, seed=0, max_episode_steps=limit) for i in ids])


def test_array_cartpole_matches_gymnasium():
    import gymnasium

    env, ids = make(3), [7, 120, 3]
    begin(env, ids)
    assert [env.instruction(env_index) for env_index in range(3)] == ["left start", "right start", "left start"]
    actions = np.random.default_rng(0).integers(0, 2, (3, 60, 1)).astype(np.float32)
    result = env.step_chunk([0, 1, 2], actions)
    state = np.zeros((3, 4), np.float32)
    env.observe([0, 1, 2], np.zeros((3, 0, 0, 0, 3), np.uint8), state)
    for env_index, reset_id in enumerate(ids):
        theirs = gymnasium.make("CartPole-v1")
        theirs.reset(seed=reset_id)
        for step, action in enumerate(actions[env_index, :, 0].astype(int)):
            seen, reward, terminated, *_ = theirs.step(action)
            assert (result.reward[env_index, step], result.terminated[env_index, step]) == (reward, terminated)
            if terminated:
                break
        assert terminated
        assert result.valid[env_index].sum() == step + 1
        np.testing.assert_allclose(state[env_index], seen, rtol=1e-5)


def test_time_limit_truncates_the_episode():
    env = make(2)
    begin(env, [1, 2], limit=3)
    result = env.step_chunk([0, 1], np.zeros((2, 5, 1), np.float32))
    assert result.truncated.tolist() == [[False, False, True, False, False]] * 2
    with pytest.raises(EnvError, match="the episode has ended"):
        env.step_chunk([1], np.zeros((1, 1, 1), np.float32))


def test_user_reward_replaces_the_simulator_reward():
    env = make(2, reward_coef=2.0, reward=StepRewardSettings(path="test_arrays:lean"))
    begin(env, [1, 2])
    result = env.step_chunk([0, 1], np.zeros((2, 1, 1), np.float32))
    np.testing.assert_allclose(result.reward[:, 0], -2.0 * np.abs(env._sims.state[:, 2]), rtol=1e-6)


def broken(step: RewardStep) -> float:
    raise ValueError("no idea")


def test_failing_reward_is_reported_once_per_episode():
    """One error per episode: if every episode has an error, the run ends."""
    env = make(2, reward=StepRewardSettings(path="test_arrays:broken"))
    begin(env, [1, 2])
    said = [env.step_chunk([0, 1], np.zeros((2, 2, 1), np.float32)).reward_errors for _ in range(2)]
    assert [sorted(one or {}) for one in said] == [[0, 1], []]
    env.reset([1], [EpisodeStart(reset_id=3, seed=0, max_episode_steps=9)])
    assert list(env.step_chunk([0, 1], np.zeros((2, 1, 1), np.float32)).reward_errors or {}) == [1]


def test_termination_flags_of_wrong_shape_are_rejected(monkeypatch):
    env = make(2)
    begin(env, [1, 2])
    advance = env._sims.step

    def columns(env_indices, actions):
        steps = advance(env_indices, actions)
        return steps._replace(terminated=steps.terminated[:, None])

    monkeypatch.setattr(env._sims, "step", columns)
    with pytest.raises(EnvError, match=r"returned terminated of shape \(2, 1\), expected \(2,\)"):
        env.step_chunk([0, 1], np.zeros((2, 1, 1), np.float32))


def test_array_environment_passes_check_env():
    from embodyrl.envs.check import check_env

    found = list(check_env(env_of(env_type="test_arrays:FACTORY", use_rel_reward=False)))
    assert {finding.level for finding in found} == {"ok"}, found


class Stairs(CartPoles):
    """Environment in which step k has reward k squared; the third step reaches the goal."""

    def step(self, env_indices: IntArray, actions: FloatArray) -> SimSteps:
        self.state[env_indices] += 1
        k = np.rint(self.state[env_indices, 0])
        return SimSteps(reward=(k**2).astype(np.float32), terminated=k >= 3, success=k >= 3, truncated=k < 0)


def as_told(step: RewardStep) -> float:
    return step.reward


STILL = np.zeros((2, 5, 1), np.float32)


def test_relative_rewards_restart_with_each_episode():
    env = ChunkedEnv(Stairs(2), 2, use_rel_reward=True, reward_coef=2.0)
    for _ in range(2):
        begin(env, [1, 2])
        assert env.step_chunk([0, 1], STILL).reward.tolist() == [[2.0, 6.0, 10.0, 0.0, 0.0]] * 2


def test_after_step_callback_gets_the_success_of_its_env():
    env = ChunkedEnv(Stairs(2), 2, use_rel_reward=False, reward_coef=1.0)
    begin(env, [1, 2])
    env.step_chunk([1], STILL[:1, :1])
    told = []
    env.step_chunk([1, 0], STILL, after_step=lambda *step: told.append(step))
    assert told == [(1, False), (0, False), (1, True), (0, False), (0, True)]


def test_success_at_the_time_limit_terminates_unless_terminations_are_ignored():
    env = ChunkedEnv(Stairs(2), 2, use_rel_reward=False, reward_coef=1.0)
    starts = [EpisodeStart(reset_id=1, seed=0, max_episode_steps=n, ignore_terminations=n > 3) for n in (3, 4)]
    env.reset([0, 1], starts)
    result = env.step_chunk([0, 1], STILL)
    assert result.valid.sum(axis=1).tolist() == [3, 4]
    assert result.terminated.sum(axis=1).tolist() == [1, 0]
    assert result.truncated.tolist() == [[False] * 5, [False, False, False, True, False]]
    assert result.success.tolist() == [[False, False, True, False, False], [False, False, True, True, False]]


def test_user_reward_can_add_to_the_simulator_reward():
    """The simulator reports absolute rewards 1, 4, 9; the relative rewards are 1, 3, 5."""
    reward = StepRewardSettings(path="test_arrays:as_told", mode=RewardMode.add)
    env = ChunkedEnv(Stairs(2), 2, use_rel_reward=True, reward_coef=1.0, reward=reward)
    begin(env, [1, 2])
    result = env.step_chunk([0, 1], STILL)
    assert result.reward[:, :3].tolist() == [[2.0, 7.0, 14.0]] * 2
    assert result.components is not None
    assert result.components.tolist() == [[14.0, 9.0, 0.0]] * 2


def acted(step: RewardStep) -> float:
    return float(step.action[0]) + 10 * step.truncated


def test_user_reward_gets_the_data_of_its_env():
    reward = StepRewardSettings(path="test_arrays:acted")
    env = ChunkedEnv(Stairs(2), 2, use_rel_reward=False, reward_coef=1.0, reward=reward)
    env.reset([0, 1], [EpisodeStart(reset_id=1, seed=0, max_episode_steps=limit) for limit in (1, 2)])
    result = env.step_chunk([0, 1], np.float32([[[5], [6], [7]], [[1], [2], [3]]]))
    assert result.reward.tolist() == [[15, 0, 0], [1, 12, 0]]
    assert result.components is not None
    assert result.components.tolist() == [[15, 0], [13, 0]]


def test_each_parallel_env_has_its_own_instruction(tmp_path):
    """Instructions in the records of a rollout equal those of the environment."""
    env = make(4)
    begin(env, [0, 99, 100, 149])
    assert [env.instruction(env_index) for env_index in range(4)] == [SPEC.tasks[task] for task in (0, 0, 1, 1)]
    words = ("env=libero_10", "env.env_type=test_arrays:FACTORY", "env.train.state_ids=null", "env.eval.state_ids=null")
    more = ("model=mlp", "algorithm=grpo", "algorithm.group_size=2", "env.train.total_num_envs=12", "launcher=inline")
    short = ("env.train.max_episode_steps=2", "runner.logger.backends=[jsonl]", f"runner.output_dir={tmp_path}")
    cfg = load_config("train", [*words, *more, *short])
    with running_crew(tmp_path, cfg=cfg) as stage:
        plan = train_episodes(cfg, stage.run_plan.env, 0, counts_chunk_steps=False)
        found = stage.workers.scheduler.collect(Rollout(plan, keep=False)).episodes
    assert {e.spec.task_id for e in found} == {0, 1}
    assert all(e.instruction == SPEC.tasks[e.spec.task_id] for e in found)
