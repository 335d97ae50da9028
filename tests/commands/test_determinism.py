"""Equal seeds give equal results for any number of processes, workers and stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_runs import comparable, toy_config, train_toy, weights

from embodyrl.commands.evaluate import evaluate
from embodyrl.monitor.history import EPISODES_FILE, read_episodes

WORDS = (
    "runner.deterministic=true",
    "runner.val_check_interval=2",
    "eval.episodes=6",
    "env.kwargs.tasks=3",
    "env.kwargs.goal=0.7",
    "env.train.total_num_envs=8",
    "algorithm.group_size=4",
    "algorithm.rollout_epoch=2",
    "actor.optim.lr=0.001",
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("golden"), *WORDS)


def test_golden_run_has_successes_and_failures(golden):
    rows = comparable(golden)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["actor/optimizer_steps"] > 0 for row in rows[1:])
    assert 0 < rows[1]["train/success_once"] < 1
    assert rows[1]["actor/loss"] != rows[2]["actor/loss"]


@pytest.mark.parametrize("stages", [1, 4])
def test_results_are_independent_of_pipeline_stages(golden, tmp_path, stages):
    run = train_toy(tmp_path, *WORDS, f"rollout.pipeline_stage_num={stages}")
    assert comparable(run) == comparable(golden)
    assert weights(run, 2) == weights(golden, 2)


@pytest.mark.integration
@pytest.mark.parametrize(("workers", "stages"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_results_are_independent_of_process_count(golden, tmp_path, workers, stages):
    spread = ("launcher=local", f"launcher.env_workers={workers}", f"rollout.pipeline_stage_num={stages}")
    run = train_toy(tmp_path, *WORDS, *spread)
    assert comparable(run) == comparable(golden)
    assert weights(run, 2) == weights(golden, 2)


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "at"), [("kill", 9), pytest.param("hang", 14, marks=pytest.mark.slow)])
def test_results_are_independent_of_worker_crashes(golden, tmp_path, kind, at):
    fault = (f"env.kwargs.fault={kind}", f"env.kwargs.at={at}", f"env.kwargs.once={tmp_path}/marker")
    spread = ("launcher=local", "launcher.env_workers=2", "faults.step_timeout_s=1")
    run = train_toy(tmp_path, *WORDS, *fault, *spread)
    lost = comparable(run)
    assert [row.pop("env/restarts") for row in lost[1:]] == [1, 1]
    assert lost == [{k: v for k, v in row.items() if k != "env/restarts"} for row in comparable(golden)]
    assert weights(run, 2) == weights(golden, 2)


@pytest.mark.integration
def test_evaluation_with_a_worker_crash_has_the_same_episodes(tmp_path):
    words = ("runner.deterministic=true", "eval.episodes=12", "env.kwargs.tasks=3", "env.kwargs.goal=0.2")
    fault = ("env.kwargs.fault=kill", "env.kwargs.at=9", f"env.kwargs.once={tmp_path}/marker")
    calm = evaluate(toy_config(tmp_path, *words, command="eval", name="calm")).folder
    spread = ("launcher=local", "launcher.env_workers=2")
    lost = evaluate(toy_config(tmp_path, *words, *fault, *spread, command="eval")).folder
    assert (tmp_path / "marker").exists(), "no worker was killed"
    one, two = (read_episodes(folder / EPISODES_FILE) for folder in (calm, lost))
    assert [replace(row, seconds=0.0) for row in one] == [replace(row, seconds=0.0) for row in two]


def test_different_seed_changes_the_results(golden, tmp_path):
    run = train_toy(tmp_path, *WORDS, "seed=1")
    assert comparable(run)[1]["actor/loss"] != comparable(golden)[1]["actor/loss"]
    assert weights(run, 2) != weights(golden, 2)


@pytest.mark.integration
def test_ppo_is_deterministic(tmp_path):
    words = ("algorithm=ppo", "runner.deterministic=true", "env.kwargs.goal=0.7")
    one = train_toy(tmp_path, *words, "rollout.pipeline_stage_num=1", name="one")
    two = train_toy(tmp_path, *words, "rollout.pipeline_stage_num=2", name="two")
    assert comparable(one) == comparable(two)
    assert weights(one, 2) == weights(two, 2)
