"""Training runs that must improve success, with configurable worker placement."""

from __future__ import annotations

from pathlib import Path

from embodyrl.commands.train import TrainResult, train
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config


def learn(folder: Path, task: str, *overrides: str, name: str = "run") -> TrainResult:
    """Train a language model with half a million random weights on a text task; validate only before and after."""
    words = [f"env=text/{task}", "model=causal_lm_tiny", "runner.val_check_interval=1000"]
    return train_gate(folder, *words, *overrides, name=name)


def train_gate(folder: Path, *words: str, name: str = "run") -> TrainResult:
    """Run `embodyrl train` with these arguments, in <folder>/<name>."""
    places = (f"runner.output_dir={folder}", f"runner.experiment_name={name}")
    cfg = load_config("train", ["runner.logger.backends=[jsonl]", *places, *words])
    check_components(cfg)
    return train(cfg)


def gain(result: TrainResult) -> tuple[float, float]:
    """Return the greedy success before and after."""
    assert result.first_eval is not None
    assert result.last_eval is not None
    return result.first_eval.overall.success_once, result.last_eval.overall.success_once
