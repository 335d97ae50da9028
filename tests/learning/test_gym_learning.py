"""Small policies on real Gymnasium tasks in complete training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodyrl.commands.train import train
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan, mismatches
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.types import PolicySpec

PENDULUM = (
    "env=gym",
    "env.id=Pendulum-v1",
    "env.reward_coef=0.1",
    "model=mlp",
    "algorithm=ppo",
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=250",
    "actor.global_batch_size=100",
    "actor.micro_batch_size=100",
    "runner.max_steps=2",
    "runner.val_check_interval=2",
    "eval.episodes=2",
)


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of an inline run."""
    places = (f"runner.output_dir={folder}", "runner.experiment_name=run")
    cfg = load_config("train", [*words, "launcher=inline", "runner.logger.backends=[jsonl]", *places])
    check_components(cfg)
    path = train(cfg).run
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.integration
def test_ppo_learns_cartpole(tmp_path):
    rows = run(tmp_path, "experiment=cartpole", "runner.max_steps=8", "runner.val_check_interval=8")
    first, last = rows[0], rows[-1]
    assert first["eval/return"] < 80
    assert rows[1]["train/return"] < 40
    assert last["eval/return"] > 150
    # One episode ends in each of these steps, and its length depends on the processor's rounding.
    assert max(row["train/return"] for row in rows[4:]) > 100
    assert last["actor/logprob_gap"] < 1e-6, "one row acts, 64 train: only rounding differs"
    assert sum(row.get("env/steps", 0) for row in rows) == 8 * 512


@pytest.mark.integration
def test_grpo_trains_without_a_value_head(tmp_path):
    words = (
        "env=gym",
        "env.id=CartPole-v1",
        "model=mlp",
        "algorithm=grpo",
        "runner.max_steps=2",
        "actor.optim.lr=0.01",
    )
    rows = run(tmp_path, *words, "env.train.max_episode_steps=60")
    assert [row["actor/optimizer_steps"] > 0 for row in rows] == [True, True]


def test_continuous_control_bootstraps_at_time_limits(tmp_path):
    """Pendulum never terminates: its own limit of 200 steps cuts every episode, before the run's limit of 1000."""
    rows = run(tmp_path, *PENDULUM)
    assert rows[0]["eval/episode_len"] == 200
    assert rows[1]["train/episode_len"] == 200
    assert rows[1]["train/episodes"] == 4
    assert all(row["train/return"] < -10 for row in rows[1:])
    assert all(row["actor/value_loss"] > 0 for row in rows[1:])


def test_pixel_environment_with_multi_discrete_actions_trains(tmp_path):
    words = ("env=gym", "env.id=pixel_env:PixelEnv", "model=cnn", "env.kwargs.size=12", *PENDULUM[4:])
    rows = run(tmp_path, *words, "env.train.max_steps_per_rollout_epoch=20", "env.eval.max_episode_steps=20")
    assert rows[-1]["actor/optimizer_steps"] > 0


def test_environment_without_images_runs_without_video(tmp_path):
    words = (*PENDULUM, "env.wrappers=[pixel_env:blind]", "env.train.max_steps_per_rollout_epoch=25", "video=all")
    rows = run(tmp_path, *words)
    assert [row["env/restarts"] for row in rows[1:]] == [0, 0]
    assert rows[-1]["eval/episodes"] == 2
    assert not list((tmp_path / "run" / "videos").rglob("*.mp4"))


@pytest.mark.integration
def test_ppo_learns_pendulum(tmp_path):
    words = (
        "env.train.total_num_envs=16",
        "env.train.max_steps_per_rollout_epoch=200",
        "env.train.use_fixed_reset_state_ids=false",
        "env.eval.total_num_envs=10",
        "eval.episodes=10",
        "algorithm.gamma=0.9",
        "algorithm.value_clip=null",
        "algorithm.update_epoch=10",
        "actor.global_batch_size=200",
        "actor.micro_batch_size=200",
        "actor.optim.lr=0.001",
        "actor.optim.value_lr=0.001",
        # Eight steps are too few for running statistics: they help in long trainings (Hopper), not here.
        *("model.normalize_state=false", "algorithm.normalize_returns=false", "actor.optim.value_clip_grad=null"),
        "env.train.continue_episodes=false",
        "runner.max_steps=8",
        "runner.val_check_interval=8",
    )
    rows = run(tmp_path, *PENDULUM, *words)
    assert rows[-1]["eval/return"] > 0.5 * rows[0]["eval/return"]


def test_continuous_policy_is_rejected_for_discrete_actions():
    cfg = load_config("train", ["env=gym", "env.id=CartPole-v1"])
    env = ENVS.get("gym").spec(cfg.env, EnvContext())
    policy = PolicySpec(name="arm", num_action_chunks=1, action_dim=1, tokens_per_chunk=1)
    (problem,) = mismatches(env, policy)
    assert "takes discrete actions, but model 'arm' outputs only box actions" in problem


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["env.id=CartPole-v1", "model=cnn"], "reads 1 camera images, but env 'CartPole-v1' has 0"),
        (["env.id=pixel_env:PixelEnv", "model=mlp"], "has none; try model=cnn"),
        (["env.id=CartPole-v1", "model=mlp", "env.train.task_ids=[1]"], "tasks 0 to 0"),
    ],
)
def test_mismatched_policy_is_rejected_before_the_start(words, text):
    cfg = load_config("train", ["env=gym", *words])
    with pytest.raises(ConfigError, match=text):
        build_run_plan(cfg, training=False)
