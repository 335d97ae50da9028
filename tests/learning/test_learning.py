"""Learning on the toy environment: success rises, and controls do not improve."""

from __future__ import annotations

import pytest
from toy_runs import rows, train_toy, weights

NARROW = "model.log_std_init=-1"
"""Initial states from which few episodes reach the goal by noise alone."""
GRPO = (
    "env.train.total_num_envs=16",
    "env.train.max_episode_steps=16",
    "algorithm.group_size=8",
    "actor.global_batch_size=64",
    "actor.optim.lr=0.003",
    NARROW,
    "runner.max_steps=12",
)


def mean_success(run, steps: slice) -> float:
    values = [row["train/success_once"] for row in rows(run)][steps]
    return sum(values) / len(values)


@pytest.mark.integration
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_improves_success(tmp_path, seed):
    words = (*GRPO, "runner.deterministic=true", f"seed={seed}")
    run = train_toy(tmp_path, *words, "runner.max_steps=20")
    assert mean_success(run, slice(-3, None)) >= mean_success(run, slice(0, 2)) + 0.4


@pytest.mark.integration
def test_grpo_with_negated_advantages_reduces_success(tmp_path):
    """The initial policy succeeds often, so that success can decrease."""
    words = (*GRPO, "env.kwargs.goal=0.3", "algorithm.adv_type=toy_gates:NEGATED_GRPO", "actor.optim.lr=0.001")
    run = train_toy(tmp_path, *words, "runner.deterministic=true", "runner.max_steps=40")
    before, after = mean_success(run, slice(0, 5)), mean_success(run, slice(-5, None))
    assert before >= 0.5
    assert after <= before - 0.4


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_ppo_with_a_value_head_improves_success(tmp_path):
    words = (
        "algorithm=ppo",
        "algorithm.update_epoch=2",
        "env.train.total_num_envs=32",
        "env.kwargs.goal=1.0",
        "actor.global_batch_size=32",
        "actor.optim.lr=0.003",
        NARROW,
        "runner.max_steps=10",
    )
    run = train_toy(tmp_path, *words)
    assert mean_success(run, slice(-3, None)) >= mean_success(run, slice(0, 2)) + 0.25
    losses = [row["actor/value_loss"] for row in rows(run)]
    assert min(losses[-3:]) < losses[0]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Create a run whose checkpoint is a fixed initial policy."""
    return train_toy(tmp_path_factory.mktemp("start"), "actor.optim.lr=0", "runner.max_steps=1")


def test_learning_rate_zero_keeps_weights_bit_identical(start, tmp_path):
    words = (f"ckpt={start}", "actor.optim.lr=0", "actor.optim.weight_decay=0.1", "env.kwargs.goal=0.7")
    run = train_toy(tmp_path, *words)
    assert sum(row["actor/optimizer_steps"] for row in rows(run)) > 0
    assert weights(run, 2) == weights(start, 1)


def test_single_update_changes_the_weights(start, tmp_path):
    run = train_toy(tmp_path, f"ckpt={start}", "env.kwargs.goal=0.7", "actor.optim.lr=0.0001")
    assert weights(run, 2) != weights(start, 1)


@pytest.mark.parametrize("goal", [1e9, -1e9], ids=["nobody succeeds", "everybody succeeds"])
def test_groups_with_equal_rewards_keep_weights_bit_identical(start, tmp_path, goal):
    words = (f"ckpt={start}", "actor.optim.lr=0.01", "actor.optim.weight_decay=0.1", f"env.kwargs.goal={goal}")
    run = train_toy(tmp_path, *words)
    for row in rows(run):
        assert row["train/success_once"] == (goal < 0)
        assert row["train/groups_without_signal"] == 1
        assert row["actor/optimizer_steps"] == 0
    assert weights(run, 2) == weights(start, 1)
