"""The default run improves success, and negated advantages reduce success."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_runs import resume_toy, rows, weights

import embodyrl
from embodyrl.commands.collect import collect
from embodyrl.commands.sft import sft
from embodyrl.plan.config import load_config


def words_for(folder: Path, *words: str) -> list[str]:
    places = (f"runner.output_dir={folder}", "runner.experiment_name=run")
    return [*places, "runner.logger.backends=[jsonl]", *words]


def default_run(folder: Path, *words: str) -> Path:
    """Run `embodyrl train` with its defaults and a few overrides."""
    return embodyrl.train(embodyrl.compose("train", *words_for(folder, *words))).run


def greedy(folder: Path, *words: str, tables: int = 150) -> float:
    """Return greedy success on the first held-out states, of the included checkpoint unless `ckpt=` is given."""
    cfg = embodyrl.compose("eval", *words_for(folder, "launcher=inline", f"eval.episodes={tables}", *words))
    return embodyrl.evaluate(cfg).overall.success_once


def validations(run: Path) -> list[float]:
    return [row["eval/success_once"] for row in rows(run) if "eval/success_once" in row]


@pytest.mark.integration
def test_initial_tabletop_policy_follows_instructions(tmp_path: Path) -> None:
    """With the same initial states and goals but instructions of another block, success is at chance level."""
    told = greedy(tmp_path / "told")
    lied = greedy(tmp_path / "lied", "env.env_type=tabletop_liar:FACTORY")
    assert 0.3 <= told <= 0.6
    assert lied <= 0.25 * told


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_few_steps_improve_the_policy(tmp_path: Path) -> None:
    few = ("runner.max_steps=5", "runner.val_check_interval=5", "runner.deterministic=true", "seed=1", "video=none")
    # Few environments: the same episodes, and less padding in inferences of one size.
    env_indices = ("env.train.total_num_envs=16", "algorithm.rollout_epoch=8", "env.eval.total_num_envs=16")
    run = default_run(tmp_path, *few, *env_indices, "eval.episodes=90")
    before, after = validations(run)
    assert after >= before + 0.25


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_gains_25_points(tmp_path: Path, seed: int) -> None:
    found = validations(default_run(tmp_path, f"seed={seed}"))
    assert found[-1] >= found[0] + 0.25


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tabletop_with_negated_advantages_reduces_success(tmp_path: Path) -> None:
    found = validations(default_run(tmp_path, "runner.max_steps=20", "algorithm.adv_type=toy_gates:NEGATED_GRPO"))
    assert found[-1] <= found[0] - 0.1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_on_policy_distillation_reaches_the_teacher(tmp_path: Path) -> None:
    """On-policy distillation: no reward, only the KL to the teacher on the student's states and actions.

    Both are evaluated on all 1500 validation states. One in sixteen is solved by only one of them, so that
    three points are four standard errors of the difference.
    """
    few = ("runner.val_check_interval=100", "video=none", "eval.episodes=60")
    teacher = default_run(tmp_path / "teacher", "runner.max_steps=20", *few)
    kl = ("algorithm.kl_beta=1", "algorithm.kl_penalty_type=k2", "algorithm.reward_scale=0", "algorithm.update_epoch=2")
    rate = ("actor.optim.lr=3e-4", "actor.optim.schedule=cosine", "actor.global_batch_size=64", "runner.max_steps=24")
    student = default_run(tmp_path / "student", f"algorithm.reference_path={teacher}", *kl, *rate, *few)
    taught = greedy(tmp_path / "taught", f"ckpt={teacher}", tables=1500)
    assert validations(student)[0] <= taught - 0.25
    assert greedy(tmp_path / "learned", f"ckpt={student}", tables=1500) >= taught - 0.03


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_episode_dpo_improves_the_initial_policy(tmp_path: Path) -> None:
    """DPO with four sampled episodes of each of 150 states, preferring the better one; evaluated on other states."""
    model = ("model=openvla_oft_tiny", "model.path=assets/openvla_oft_tabletop", "model.num_images_in_input=1")
    model = (*model, "model.num_action_chunks=4")
    view = ("env.init_params.camera_names=[front]", "env.init_params.camera_heights=56")
    view = ("env=tabletop", *view, "env.init_params.camera_widths=56", "env.train.max_episode_steps=24")
    asked = ("collect.episodes=600", "collect.filter=all", "eval.sampling_params.do_sample=true")
    asked = (*asked, "env.train.state_ids=[0,49]", "env.train.task_ids=[0,1,2]", "env.train.total_num_envs=48")
    places = (f"collect.out={tmp_path}/ranked", f"runner.output_dir={tmp_path}", "runner.logger.backends=[jsonl]")
    collect(load_config("collect", [*view, *model, *asked, *places]))
    rates = ("actor.global_batch_size=64", "actor.micro_batch_size=64", "actor.optim.lr=2e-4")
    rates = (*rates, "actor.optim.schedule=cosine", "runner.max_steps=50", "runner.val_check_interval=-1")
    words = ("objective.name=dpo", f"data.path={tmp_path}/ranked", *model, *rates, *places[1:])
    learned = sft(load_config("sft", list(words))).run
    assert greedy(tmp_path / "after", f"ckpt={learned}") >= greedy(tmp_path / "before") + 0.2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tabletop_run_with_learning_rate_zero_keeps_weights(tmp_path: Path) -> None:
    once = default_run(tmp_path / "a", "runner.max_steps=1", "actor.optim.lr=0", "eval.episodes=1")
    twice = default_run(tmp_path / "b", "runner.max_steps=2", "actor.optim.lr=0", "eval.episodes=1")
    assert weights(once, 1) == weights(twice, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resumed_tabletop_run_is_identical(tmp_path: Path) -> None:
    few = ("runner.deterministic=true", "runner.save_interval=2", "eval.episodes=30", "runner.val_check_interval=4")
    whole = default_run(tmp_path / "whole", "runner.max_steps=4", *few)
    half = default_run(tmp_path / "half", "runner.max_steps=2", *few)
    resume_toy(half, "runner.max_steps=4")
    assert weights(half, 4) == weights(whole, 4)
