"""Rewards that were learned, and reinforcement learning on nothing but them."""

from pathlib import Path

import pytest
from gates import gain, train_gate

from embodyrl.commands.collect import collect
from embodyrl.commands.sft import sft
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

VIEW = ["env=tabletop", "env.init_params.camera_heights=56", "env.init_params.camera_widths=56"]
VIEW += ["env.init_params.camera_names=[front]"]


@pytest.mark.xfail(reason="after 150 steps the network is no better than the base rate of its 15 held-out episodes")
def test_reinforcement_learning_on_recognised_success_raises_the_true_one(tmp_path: Path) -> None:
    """Episodes of the shipped start, frames after success included; a small network learns which ones show it."""
    quiet = ["runner.logger.backends=[jsonl]", f"runner.output_dir={tmp_path}", "launcher=inline"]
    task = ["env.train.task_ids=[0]", "env.train.max_episode_steps=24", "env.train.ignore_terminations=true"]
    start = ["model=openvla_oft_tiny", "model.path=assets/openvla_oft_tabletop", "model.num_images_in_input=1"]
    played = ["collect.episodes=150", "collect.filter=all", "eval.sampling_params.do_sample=true"]
    out = f"collect.out={tmp_path}/demos"
    collect(load_config("collect", [*VIEW, *task, *start, "model.num_action_chunks=4", out, *played, *quiet]))

    words = ["model=cnn", "objective.name=success", f"data.path={tmp_path}/demos", "data.image_aug=false"]
    sizes = ["actor.global_batch_size=128", "actor.micro_batch_size=128", "actor.optim.lr=1e-3"]
    steps = ["runner.max_steps=150", "runner.val_check_interval=150"]
    cfg = load_config("sft", [*words, *sizes, *steps, *quiet])
    check_components(cfg)
    judge = sft(cfg)
    assert judge.metrics["eval/accuracy"] >= 0.9

    tasks = ("env.train.task_ids=[0]", "env.eval.task_ids=[0]", "eval.episodes=100", "video=none")
    few = ("runner.max_steps=25", "runner.val_check_interval=25")
    result = train_gate(tmp_path, f"reward.path={judge.checkpoint}/policy", *tasks, *few, name="rl")
    before, after = gain(result)
    assert after >= before + 0.2
