"""A language model of half a million random weights learns text tasks through the whole stack."""

from pathlib import Path

import pytest

from embodyrl.config.load import load_config, load_saved_config
from embodyrl.runtime.checks import check_components
from embodyrl.runtime.sft import sft
from embodyrl.runtime.train import TrainResult, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def learn(folder: Path, task: str, *overrides: str, name: str = "run") -> TrainResult:
    words = [f"env=text/{task}", "model=causal_lm_tiny", "runner.logger.backends=[jsonl]"]
    words += [f"runner.output_dir={folder}", f"runner.experiment_name={name}", "runner.val_check_interval=1000"]
    cfg = load_config("train", [*words, *overrides])
    check_components(cfg)
    return train(cfg)


def gain(result: TrainResult) -> tuple[float, float]:
    assert result.first is not None
    assert result.last is not None
    return result.first.overall.success_once, result.last.overall.success_once


def test_length_from_nothing(tmp_path: Path):
    before, after = gain(learn(tmp_path, "length"))
    assert before < 0.1
    assert after >= 0.9


def test_a_negated_reward_teaches_nothing(tmp_path: Path):
    canary = ("reward.weights={exact: -0.5, overlap: -0.5}", "runner.max_steps=8", "launcher=inline")
    assert gain(learn(tmp_path, "length", *canary))[1] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "gspo", "reinforce_pp"])
def test_copy_from_nothing(tmp_path: Path, algorithm: str):
    assert gain(learn(tmp_path, "copy", f"algorithm={algorithm}"))[1] >= 0.95


@pytest.mark.slow
def test_copy_with_two_passes_of_two_batches(tmp_path: Path):
    result = learn(tmp_path, "copy", "algorithm.update_epoch=2", "actor.global_batch_size=128", "actor.optim.lr=5e-4")
    assert gain(result)[1] >= 0.95


@pytest.mark.slow
def test_reverse_by_sft_then_sparse_reward_resumed_in_the_middle(tmp_path: Path):
    words = ["data.path=embodyrl.datasets.tasks:reverse", "model=causal_lm_tiny", "runner.logger.backends=[jsonl]"]
    words += [f"runner.output_dir={tmp_path}", "runner.max_steps=220", "runner.val_check_interval=-1"]
    cfg = load_config("sft", [*words, "actor.global_batch_size=64", "actor.micro_batch_size=64"])
    check_components(cfg, "sft")
    start = sft(cfg).run
    sparse = ("reward.weights={exact: 1.0}", f"ckpt={start}", "runner.max_steps=100", "runner.save_interval=50")
    before, after = gain(learn(tmp_path, "reverse", *sparse, "runner.max_steps=50", name="rl"))
    assert before <= 0.45
    again = load_saved_config(tmp_path / "rl", ["runner.max_steps=100", "ckpt=null"])
    resumed = train(again, resume=tmp_path / "rl")
    assert resumed.last is not None
    assert resumed.last.overall.success_once >= max(0.8, after)
