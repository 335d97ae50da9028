"""Filtered behavior cloning in complete training runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file
from toy_runs import rows

from embodyrl.commands.train import train
from embodyrl.plan.config import load_config, load_saved_config

QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]", "algorithm=filtered_bc")
CARTPOLE = (
    *("env=gym", "env.id=CartPole-v1", "model=mlp", "model.num_action_chunks=1", "env.train.total_num_envs=16"),
    *(
        "env.train.max_episode_steps=200",
        "env.reward_coef=1.0",
        "video=none",
        "actor.global_batch_size=64",
        "actor.optim.lr=0.01",
    ),
    *("algorithm.learning_starts=64", "algorithm.imitate_above=60", "algorithm.updates_per_sample=0.2"),
)


def words_of(folder: Path, *words: str) -> list[str]:
    return [*QUIET, *words, f"runner.output_dir={folder}"]


@pytest.mark.integration
def test_filtered_bc_improves_cartpole(tmp_path):
    """Few of the first episodes are used for training, most of the last ones."""
    words = words_of(tmp_path, *CARTPOLE, "runner.max_steps=16")
    found = rows(train(load_config("train", words)).run)
    first, last = (sum(row["train/return"] for row in part) / 3 for part in (found[:3], found[-3:]))
    assert last > 2 * first, (first, last)


@pytest.mark.integration
def test_resumed_filtered_bc_matches_an_uninterrupted_run(tmp_path):
    words = words_of(tmp_path, *CARTPOLE, "runner.max_steps=4", "runner.save_interval=2", "checkpoint.keep=9")
    words += ["runner.deterministic=true"]
    whole = train(load_config("train", [*words, "runner.experiment_name=whole"])).run
    started = load_config("train", [*words, "runner.experiment_name=half"])
    half = train(started, on_step=lambda step, _: step == 2).run
    train(load_saved_config(half, []), resume=half)
    for name in ("policy/model.safetensors", "replay.safetensors"):
        one, two = (load_file(run / "checkpoints/step_000004" / name) for run in (whole, half))
        assert {key: value.tobytes() for key, value in one.items()} == {k: v.tobytes() for k, v in two.items()}


@pytest.mark.integration
def test_filtered_bc_trains_text_policies(tmp_path):
    words = words_of(tmp_path, "env=text/length", "model=causal_lm_tiny", "runner.max_steps=2")
    words += [
        "algorithm.learning_starts=1",
        "algorithm.imitate_above=-100",
        "actor.global_batch_size=16",
        "actor.micro_batch_size=16",
    ]
    last = rows(train(load_config("train", words)).run)[-1]
    assert last["actor/optimizer_steps"] >= 1
    assert last["actor/grad_norm"] > 0
    assert last["actor/skipped_nonfinite"] == 0
