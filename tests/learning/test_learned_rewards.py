"""Learned reward models, and RL on their rewards only."""

from pathlib import Path

import pytest
from gates import gain, train_gate

from embodyrl.commands.collect import collect
from embodyrl.commands.sft import sft
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]

VIEW = ["env=tabletop", "env.init_params.camera_heights=56", "env.init_params.camera_widths=56"]


def train_classifier(folder: Path, episodes: int = 150, steps: int = 250) -> Path:
    """Train a small classifier on a noisy expert's episodes, including frames after success, from both cameras."""
    quiet = ["runner.logger.backends=[jsonl]", f"runner.output_dir={folder}", "launcher=inline"]
    task = ["env.train.task_ids=[2]", "env.train.max_episode_steps=24", "env.train.ignore_terminations=true"]
    played = ["model=scripted", "model.expert_noise=1.5", f"collect.episodes={episodes}", "collect.filter=all"]
    collect(load_config("collect", [*VIEW, *task, f"collect.out={folder}/demos", *played, *quiet]))

    words = ["model=cnn", "objective.name=success", f"data.path={folder}/demos", "data.image_aug=false"]
    sizes = ["actor.global_batch_size=128", "actor.micro_batch_size=128", "actor.optim.lr=1e-3"]
    cfg = load_config(
        "sft", [*words, *sizes, f"runner.max_steps={steps}", f"runner.val_check_interval={steps}", *quiet]
    )
    check_components(cfg)
    judge = sft(cfg)
    # Nine frames of ten show no success.
    assert judge.metrics["eval/accuracy"] >= 0.94
    return judge.checkpoint / "policy"


def test_training_on_a_reward_model_improves_true_success(tmp_path: Path) -> None:
    """The policy uses the front camera, the reward model both; the simulator only measures success."""
    cameras = ("env=tabletop", "env.init_params.camera_names=[front,wrist]", "env.train.task_ids=[2]")
    few = ("runner.max_steps=7", "runner.val_check_interval=7", "env.eval.task_ids=[2]", "eval.episodes=100")
    words = (*cameras, *few, "video=none", f"reward.path={train_classifier(tmp_path)}")
    before, after = gain(train_gate(tmp_path, *words, name="rl"))
    assert after >= before + 0.2
