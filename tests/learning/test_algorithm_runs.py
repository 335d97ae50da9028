"""Every preset trains in a real run, and actor settings have the documented effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_runs import comparable, resume_toy, rows, train_toy, weights

from embodyrl.algorithms.settings import GroupSettings
from embodyrl.commands.train import train
from embodyrl.config import compose
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

FROM_A_BUFFER = {"sac", "rlpd", "td3_bc", "filtered_bc", "iql"}
"""Presets without a ratio: see `test_off_policy_runs`, `test_filtered_runs`, tests/learners/off_policy and iql."""
PRESETS = sorted(compose.options("algorithm").keys() - FROM_A_BUFFER)


@pytest.mark.integration
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(tmp_path: Path, preset: str) -> None:
    words = [
        *("env=gym", "env.id=CartPole-v1", "model=mlp", f"algorithm={preset}", "launcher=inline"),
        *("env.train.total_num_envs=8", "env.train.max_episode_steps=200", "model.num_action_chunks=1"),
        *("actor.micro_batch_size=64", "actor.global_batch_size=128", "runner.max_steps=2"),
        *("runner.logger.backends=[jsonl]", "video=none"),
        *(f"runner.output_dir={tmp_path}", "runner.experiment_name=run", "env.reward_coef=1.0"),
    ]
    cfg = load_config("train", words)
    if isinstance(cfg.algorithm, GroupSettings):
        cfg = cfg.updated({"algorithm.filter_rewards": None})
    check_components(cfg)
    first, last = rows(train(cfg).run)
    assert first["actor/optimizer_steps"] >= 1
    assert last["actor/grad_norm"] > 0
    assert first["actor/ratio"] == pytest.approx(1.0, abs=0.2)


SHORT = ("env.kwargs.goal=0.7", "env.train.total_num_envs=4", "runner.deterministic=true", "actor.optim.lr=0.001")
PPO = ("algorithm=ppo", "algorithm.group_size=1")


def test_critic_warmup_changes_only_the_value_head(tmp_path: Path) -> None:
    from safetensors.numpy import load

    run = train_toy(tmp_path, *SHORT, *PPO, "algorithm.critic_warmup=1", "runner.save_interval=1")
    steps = [
        {name: array for data in weights(run, step).values() for name, array in load(data).items()} for step in (1, 2)
    ]
    moved = {name for name in steps[0] if (steps[0][name] != steps[1][name]).any()}
    assert any("value_head" not in name for name in moved), "the second step trains everything"
    cold = train_toy(tmp_path, *SHORT, *PPO, "algorithm.critic_warmup=2", "runner.save_interval=1", name="cold")
    later = {name: array for data in weights(cold, 2).values() for name, array in load(data).items()}
    still = {name for name in steps[0] if (steps[0][name] == later[name]).all()}
    assert {name for name in steps[0] if "value_head" not in name} == still


def test_update_stops_once_the_ratio_is_too_large(tmp_path: Path) -> None:
    words = (*SHORT, *PPO, "actor.global_batch_size=4", "actor.micro_batch_size=4", "runner.max_steps=1")
    free = rows(train_toy(tmp_path, *words, "algorithm.update_epoch=8", "actor.optim.lr=0.01", name="free"))[0]
    stopped = rows(
        train_toy(
            tmp_path, *words, "algorithm.update_epoch=8", "actor.optim.lr=0.01", "algorithm.early_stop_imp_ratio=1.01"
        )
    )[0]
    assert stopped["actor/early_stopped"] == 1
    assert 0 < stopped["actor/optimizer_steps"] < free["actor/optimizer_steps"]


def test_recomputed_logprobs_match_the_rollout(tmp_path: Path) -> None:
    words = (*SHORT, *PPO, "algorithm.old_logprob=recompute", "algorithm.behave_weight_threshold=2")
    row = rows(train_toy(tmp_path, *words, "model.precision=fp32", "runner.max_steps=1"))[0]
    assert row["actor/behaviour_gap"] < 1e-4
    assert row["actor/behaviour_removed"] == 0


def test_adaptive_kl_coefficient_is_restored_on_resume(tmp_path: Path) -> None:
    words = (*SHORT, "algorithm.kl_beta=0.1", "algorithm.kl_in_reward=true", "algorithm.kl_target=1e-6")
    words = (*words, "algorithm.kl_horizon=10", "algorithm.kl_penalty_type=k2")
    whole = train_toy(tmp_path, *words, "runner.max_steps=3", name="whole")
    part = train_toy(tmp_path, *words, "runner.max_steps=2", name="part")
    resume_toy(part, "runner.max_steps=3")
    betas = [row["train/kl_beta"] for row in rows(whole)]
    assert betas[0] == 0.1
    assert len(set(betas)) > 1
    assert comparable(part) == comparable(whole)
