"""Commands with tiny pi0, pi0.5 and SmolVLA folders on the toy environment, in process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_work import Rollout, losses, run_ranks, state
from safetensors.numpy import load_file
from tiny_vla import FORMS, write_checkpoint
from toy_runs import comparable, resume_toy, rows

from embodyrl.api.acting import load_policy
from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

pytestmark = pytest.mark.integration
ENV = (
    "env=libero_10",
    "env.env_type=toy_env:FACTORY",
    "env.train.state_ids=null",
    "env.train.max_episode_steps=8",
)
PLAYED = ("env.eval.state_ids=null", "env.eval.max_episode_steps=8", "env.eval.total_num_envs=2")
HARD = ("env.kwargs.tasks=2", "env.kwargs.goal=2.6")
TRAIN = (
    *PLAYED,
    "env.train.total_num_envs=4",
    "algorithm.group_size=2",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=4",
    "runner.max_steps=2",
)
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")


def model_words(form, path, *more):
    return (
        f"model={form}",
        f"model.path={path}",
        "model.num_action_chunks=4",
        "model.num_images_in_input=1",
        "model.precision=fp32",
        "model.num_steps=4",
        *more,
    )


def configure(command, folder, *words):
    cfg = load_config(command, [f"runner.output_dir={folder}", "runner.experiment_name=run", *QUIET, *words])
    check_components(cfg)
    return cfg


def checkpoint(tmp_path, form, **options):
    return write_checkpoint(tmp_path / form, form, state_dim=1, action_dim=7, **options)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Collect twenty demonstrations of moving right and left."""
    folder = tmp_path_factory.mktemp("demos")
    words = (*ENV, *HARD, f"collect.out={folder}/demos", "collect.episodes=20")
    collect(configure("collect", folder, *words))
    return folder / "demos"


def saved(run, step):
    """Return the policy weights of a checkpoint."""
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "policy" / "model.safetensors")


def success(folder, *words):
    settings = ("eval.episodes_per_task=4",)
    env = tuple(word for word in ENV if "train" not in word)
    return evaluate(configure("eval", folder, *env, *HARD, *PLAYED, *settings, *words)).overall.success_once


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", FORMS)
def test_sft_trains_with_flow_matching(form, demos, tmp_path):
    """From random weights, with the statistics of the data; the policy then succeeds, for any form of its path."""
    path = checkpoint(tmp_path, form, random=True)
    small = ("actor.global_batch_size=32", "actor.micro_batch_size=32", "data.image_aug=false")
    schedule = ("runner.max_steps=150", "runner.val_check_interval=150", "actor.optim.lr=5e-3")
    words = (*model_words(form, path, "model.train_expert_only=false"), *small, *schedule)
    result = sft(configure("sft", tmp_path / "sft", f"data.path={demos}", *words))
    first = rows(result.run)[0]
    assert result.metrics["eval/loss"] < 0.5 * first["eval/loss"]
    assert (result.checkpoint / "policy" / "dataset_statistics.json").exists()
    trained = model_words(form, result.checkpoint / "policy")
    assert success(tmp_path / "one", *trained) >= 0.75
    assert success(tmp_path / "two", *model_words(form, path), f"ckpt={result.run}") >= 0.75


@pytest.mark.parametrize(
    ("form", "algorithm"),
    [
        ("pi05", "ppo"),
        ("smolvla", "grpo"),
        pytest.param("pi0", "ppo", marks=pytest.mark.slow),
        pytest.param("pi0", "grpo", marks=pytest.mark.slow),
        pytest.param("pi05", "grpo", marks=pytest.mark.slow),
        pytest.param("smolvla", "ppo", marks=pytest.mark.slow),
    ],
)
def test_resumed_rl_run_is_identical(form, algorithm, tmp_path):
    path = checkpoint(tmp_path, form)
    chosen = ("algorithm=ppo",) if algorithm == "ppo" else ()
    extra = ("model.likelihood=flow_noise",) if form == "pi05" else ()
    words = (*ENV, *TRAIN, *chosen, *model_words(form, path, *extra), "runner.save_interval=1")
    reward = ("env.kwargs.echo=true",)
    if algorithm == "ppo":
        words = tuple(word for word in words if "group_size" not in word)
    whole = train(configure("train", tmp_path / "whole", *words, *reward)).run
    half = train(configure("train", tmp_path / "half", *words, *reward, "runner.max_steps=1")).run
    resumed = resume_toy(half, "runner.max_steps=2")
    for one, other in zip(comparable(whole)[1:], comparable(resumed)[1:], strict=True):
        for key in ("actor/loss", "train/return_mean", "actor/grad_norm"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    a, b, start = saved(whole, 2), saved(resumed, 2), saved(whole, 1)
    assert a.keys() == b.keys()
    assert all(np.allclose(a[key], b[key], atol=1e-6) for key in a)
    assert any(not np.array_equal(a[key], start[key]) for key in a)
    assert all(np.array_equal(a[key], start[key]) for key in a if "paligemma.model" in key or ".vlm.model" in key)


def test_adapters_are_trained_and_evaluated(tmp_path):
    path = checkpoint(tmp_path, "pi0")
    lora = ("model.is_lora=true", "model.lora.r=2", "model.lora.lora_alpha=2")
    words = (*ENV, *TRAIN, *model_words("pi0", path, *lora), "env.kwargs.echo=true")
    run = train(configure("train", tmp_path / "run", *words)).run
    assert list(run.rglob("adapter_model.safetensors"))
    env = tuple(word for word in ENV if "train" not in word)
    words = (*env, *PLAYED, *model_words("pi0", path), "eval.episodes_per_task=2", f"ckpt={run}")
    assert evaluate(configure("eval", tmp_path / "eval", *words)).overall.episodes == 2


def test_small_policy_trains_from_scratch(tmp_path):
    small = ("model=flow_small", "model.num_action_chunks=4", "actor.optim.warmup_steps=0")
    run = train(configure("train", tmp_path, *ENV, *TRAIN, *small, "env.kwargs.echo=true")).run
    assert rows(run)[-1]["actor/loss"] != 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("form", "more"),
    [
        (
            "smolvla",
            ("model.train_expert_only=false", "model.likelihood=flow_noise", "actor.gradient_checkpointing=true"),
        ),
        pytest.param("pi0", (), marks=pytest.mark.slow),
        pytest.param("pi05", ("model.is_lora=true", "model.lora.r=2"), marks=pytest.mark.slow),
    ],
    ids=["all", "expert", "adapters"],
)
def test_vla_two_ranks_match_one(form, more, tmp_path):
    """Losses and weights for any frozen parts; a checkpoint of one rank resumes on two."""
    path = checkpoint(tmp_path, form)
    learning = ("algorithm=ppo", "algorithm.update_epoch=1", "actor.optim.lr=0.001", "actor.micro_batch_size=3")
    words = ("~model.use_proprio=", *model_words(form, path, *more), "model.num_steps=2", *learning)
    run_ranks(tmp_path, 1, [Rollout(name="one", words=words, last=2), Rollout(name="half", words=words, last=1)])
    back = Rollout(name="back", words=words, first=1, last=2, load=tmp_path / "half" / "saved")
    run_ranks(tmp_path, 2, [Rollout(name="two", words=words, last=2), back])
    for other in ("two", "back"):
        one, many = losses(tmp_path / "one")[-1], losses(tmp_path / other)[-1]
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-5)
        a, b = state(tmp_path / "one" / "saved"), state(tmp_path / other / "saved")
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(b[key], a[key], rtol=0, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_published_folder_loads_from_python(tmp_path):
    folder = write_checkpoint(tmp_path / "smolvla", "smolvla", state_dim=4, action_dim=7, lerobot_statistics=True)
    words = [word for word in model_words("smolvla", folder) if not word.startswith("model.path")]
    policy = load_policy(folder, "env=tabletop", "env.init_params.camera_names=[front]", *words)
    with policy.make_env() as env:
        seen, _ = env.reset(seed=0)
        assert policy.act(seen).shape == (4, 7)
