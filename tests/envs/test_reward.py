"""User-defined rewards: arguments, combination with the simulator's reward, and errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from doubles import ScriptedBatch, ScriptedSims, steps_of
from safetensors.numpy import save_file
from settings import env_of
from toy_runs import rows, toy_config

from embodyrl.commands.train import train
from embodyrl.envs import ENVS
from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.reward import RewardMode, RewardStep, StepRewardSettings, reward_problems
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.types import EpisodeStart, ObservationOut

SEEN: list[RewardStep] = []


def watched(step: RewardStep) -> float:
    SEEN.append(step)
    return float(step.observation.state[1] + 10 * step.success)


def parts(step: RewardStep) -> dict[str, float]:
    return {"near": 1.0, "effort": -float(abs(step.action).sum())}


parts.components = ("near", "effort")  # type: ignore[attr-defined]


def moody(step: RewardStep) -> float:
    if step.step == 2:
        raise RuntimeError("bad mood")
    return float("inf") if step.step == 3 else 1.0


def other_parts(step: RewardStep) -> dict[str, float]:
    return {"near": 1.0}


other_parts.components = ("near", "far")  # type: ignore[attr-defined]


def told(step: RewardStep) -> float:
    return step.info["position"]


def never(step: RewardStep) -> float:
    raise RuntimeError("no reward today")


def two_arguments(step: RewardStep, more: int) -> float:
    return 0.0


def own(name: str, **keys) -> StepRewardSettings:
    return StepRewardSettings(path=f"test_reward:{name}", **keys)


def run(reward: StepRewardSettings, rewards=(0, 2, 5), *, coef=1.0, relative=True, **flags):
    """Run one episode of one chunk."""
    sims = ScriptedSims([steps_of(rewards, **flags)])
    env = ChunkedEnv(sims, 1, use_rel_reward=relative, reward_coef=coef, reward=reward)
    env.reset([0], [EpisodeStart(reset_id=0, seed=1, max_episode_steps=len(rewards))])
    actions = np.linspace(0, 1, 2 * (len(rewards) + 1), dtype=np.float32).reshape(1, -1, 2)
    return env, actions, env.step_chunk([0], actions)


def test_reward_function_gets_executed_steps():
    SEEN.clear()
    _, actions, result = run(own("watched"), success=[2], terminated=[2])
    assert result.reward.tolist() == [[1, 2, 13, 0]]  # executed steps, 10 for success; not relative
    assert [(s.step, s.reward, s.success, s.terminated, s.truncated) for s in SEEN] == [
        (1, 0.0, False, False, False),
        (2, 2.0, False, False, False),
        (3, 5.0, True, True, False),
    ]
    assert np.array_equal([s.action for s in SEEN], actions[0, :3])
    assert {(s.env_index, s.reset_id, s.task_id, s.instruction) for s in SEEN} == {(0, 0, 0, "do thing 0")}
    assert [int(s.observation.images[0, 0, 0, 0]) for s in SEEN] == [1, 2, 3]  # copies, not one view
    assert result.components.tolist() == [[16.0, 0.0]]


def test_reward_mode_selects_replacing_or_adding():
    _, actions, replaced = run(own("parts", weights={"effort": 0.5}), coef=2.0)
    effort = -np.abs(actions[0, :3]).sum(-1)
    assert replaced.reward[0, :3] == pytest.approx(2 * (1 + 0.5 * effort))
    assert replaced.components[0] == pytest.approx([3, effort.sum(), 0])
    env, _, added = run(own("parts", mode=RewardMode.add, weights={"simulator": 10.0, "effort": 0.0}))
    assert env.spec.reward.components == ("near", "effort", "simulator", "errors")
    assert env.spec.reward.weights == (1.0, 0.0, 10.0, 0.0)
    assert added.reward.tolist() == [[1, 21, 31, 0]]  # 1, and 10 times the change of the simulator's reward
    assert added.components[0] == pytest.approx([3, effort.sum(), 5, 0])


def test_success_bonus_is_added():
    bonus = {"path": "embodyrl.envs.reward:success", "mode": RewardMode.add, "weights": {"success": 5.0}}
    _, _, result = run(StepRewardSettings.model_validate(bonus), success=[2], terminated=[2])
    assert result.reward.tolist() == [[0, 2, 8, 0]]


def test_failed_reward_is_zero_and_reported_once():
    env, actions, result = run(own("moody"), rewards=(1, 1, 1, 1))
    assert result.reward.tolist() == [[1, 0, 0, 1, 0]]
    assert result.components.tolist() == [[2.0, 2.0]]
    (why,) = result.reward_errors.values()
    assert "environment 0, task 0 ('do thing 0'), initial state 0, step 2: RuntimeError: bad mood" in why
    env.reset([0], [EpisodeStart(reset_id=0, seed=1, max_episode_steps=9)])
    assert env.step_chunk([0], actions[:, :1]).reward_errors == {}
    assert list(env.step_chunk([0], actions[:, :1]).reward_errors) == [0]
    _, _, wrong = run(own("other_parts"))
    assert "the function returned components near, expected near, far" in wrong.reward_errors[0]


def test_batched_environments_pass_env_index_and_task_to_the_reward():
    SEEN.clear()
    sims = ScriptedBatch([steps_of([0.0]), steps_of([0.0])])
    env = ChunkedEnv(sims, 2, use_rel_reward=False, reward_coef=1.0, reward=own("watched"))
    env.reset([0, 1], [EpisodeStart(reset_id=1 - i, seed=0, max_episode_steps=2 + i) for i in range(2)])
    result = env.step_chunk([0, 1], np.zeros((2, 3, 2), np.float32))
    assert result.reward.tolist() == [[1, 2, 0], [1, 2, 3]]
    told = [(s.env_index, s.reset_id, s.task_id, s.instruction, s.truncated) for s in SEEN[-3:]]
    other = (1, 0, 0, "do thing 0")
    assert told == [(0, 1, 1, "do thing 1", True), (*other, False), (*other, True)]


def test_reward_gets_gymnasium_info():
    cfg = env_of(env_type="gym", id="CartPole-v1", wrappers=["gymnasium.wrappers:RecordEpisodeStatistics"])
    factory, context = ENVS.get("gym"), EnvContext(num_envs=2, reward=own("watched"))
    assert factory.spec(cfg, context).reward.components == ("watched", "errors")
    SEEN.clear()
    env = factory.make(cfg, context)
    env.reset([0, 1], [EpisodeStart(reset_id=i, seed=0, max_episode_steps=50) for i in range(2)])
    try:
        result = env.step_chunk([0, 1], np.ones((2, 50, 1), np.float32))
    finally:
        env.close()
    assert result.reward_errors == {}
    last = SEEN[-1]
    assert last.terminated
    assert last.info["episode"]["l"] == last.step


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward.path=os:system"], "reward.path: reward 'os:system' is"),
        (["reward.path=test_reward:two_arguments"], "expected a function of a RewardStep"),
        (["reward.path=test_reward:nothing"], "has no 'nothing'"),
        (["reward.path=test_reward"], "Unknown reward 'test_reward'. Known: choice"),
        (["reward.path=test_reward:parts", "reward.weights={far: 1}"], "unknown reward component far. Known: near"),
        (["reward.weights={near: 1}"], "reward.weights needs reward.path"),
        (["reward.path=test_reward:parts", "reward.mode=instead"], "must be one of replace, add"),
        (["reward.timeout_s=3"], "env_type 'tabletop' does not read reward.timeout_s"),
    ],
)
def test_reward_keys_without_effect_give_a_warning(words, said):
    with pytest.raises(ConfigError) as caught:
        check_components(load_config("train", ["env=tabletop", *words]))
    assert said in str(caught.value)


def test_reward_path_gives_a_warning_in_commands_without_rewards(caplog):
    load_config("check-env", ["env=tabletop", "reward.path=test_reward:parts"])
    load_config("sft", ["data.path=a", "reward.path=test_reward:parts"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("does not read reward.path" in line for line in lines)
    assert reward_problems(StepRewardSettings()) == []


@pytest.mark.integration
def test_training_uses_the_reward_and_logs_its_components(tmp_path):
    words = ("reward.path=test_reward:told", "reward.mode=add", "algorithm.rollout_epoch=2")
    cfg = toy_config(tmp_path, *words)
    train(cfg)
    first, *_ = rows(tmp_path / "run")
    assert first["train/reward_told"] != 0
    assert first["train/reward_errors"] == 0
    both = first["train/reward_told"] + first["train/reward_simulator"]
    assert first["train/return"] == pytest.approx(both, rel=1e-4)
    assert "path: test_reward:told" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.integration
def test_always_failing_reward_ends_the_run(tmp_path):
    why = r"None of 4 episodes has a reward: .*step 1: RuntimeError: no reward today \(test_reward\.py, line \d+\)"
    with pytest.raises(EmbodyError, match=why):
        train(toy_config(tmp_path, "reward.path=test_reward:never"))


@pytest.mark.integration
def test_tabletop_trains_on_a_user_reward(tmp_path):
    words = ("env=tabletop", "model=openvla_oft_tiny", "algorithm=grpo", "algorithm.group_size=2", "launcher=inline")
    small = ("env.train.total_num_envs=4", "env.train.max_episode_steps=8", "runner.max_steps=1")
    more = (
        "actor.micro_batch_size=8",
        "actor.global_batch_size=8",
        "runner.logger.backends=[jsonl]",
        "runner.val_check_interval=-1",
    )
    place = (f"runner.output_dir={tmp_path}", "runner.experiment_name=run", "reward.path=test_reward:parts")
    cfg = load_config("train", [*words, *small, *more, *place])
    check_components(cfg)
    train(cfg)
    (row,) = rows(tmp_path / "run")
    assert row["train/reward_near"] == pytest.approx(row["train/episode_len"])  # 1 for each step
    assert row["train/reward_effort"] < 0
    assert row["actor/grad_norm"] > 0


def test_reward_model_returns_the_increase_of_success_probability(tmp_path):
    """A network with one weight: the state is the log-odds. Each environment and each episode starts at 0."""
    from embodyrl.envs.learned_reward import LearnedReward

    shape = {"num_images": 0, "normalized": False, "activation": "tanh", "hidden": [], "state_dim": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    save_file(
        {"value_head.0.weight": np.ones((1, 1), np.float32), "value_head.0.bias": np.zeros(1, np.float32)},
        tmp_path / "model.safetensors",
    )
    reward = LearnedReward(tmp_path)

    def earned(step: int, chance: float, env_index: int = 0) -> float:
        state = np.array([np.log(chance / (1 - chance))], np.float32)
        seen = ObservationOut(images=np.zeros((0, 0, 0, 3), np.uint8), state=state)
        told = {"reset_id": 0, "task_id": 0, "instruction": "", "action": np.zeros(1, np.float32), "reward": 0.0}
        flags = dict.fromkeys(("success", "terminated", "truncated"), False)
        return reward(RewardStep(env_index=env_index, step=step, **told, **flags, look=lambda: seen, ask=dict))

    first = [earned(1, 0.2), earned(2, 0.6), earned(1, 0.5, env_index=1), earned(3, 0.4), earned(4, 0.7)]
    assert first == pytest.approx([0.2, 0.4, 0.5, 0.0, 0.1], abs=1e-6)
    assert [earned(1, 0.3), earned(2, 0.4)] == pytest.approx([0.3, 0.1], abs=1e-6)
    assert earned(2, 0.4) == pytest.approx(0.1, abs=1e-6), "a loaded state continues at an earlier step"


def test_folder_of_another_model_is_rejected(tmp_path):
    save_file({"weight": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"reward\.path: .* does not contain a reward model\. Train one"):
        check_components(load_config("eval", ["env=tabletop", "model=random", f"reward.path={tmp_path}"]))


def test_reward_model_for_other_observations_ends_the_run(tmp_path):
    """The error is not counted as an error of a single step."""
    shape = {"num_images": 0, "normalized": False, "activation": "tanh", "hidden": [], "state_dim": 7}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    save_file({"value_head.0.weight": np.ones((1, 7), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"inputs \(7 state numbers"):
        run(StepRewardSettings(path=str(tmp_path)))
