"""Commands with small ACT and diffusion policies on tabletop, in process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from golden_lerobot import fresh
from rank_work import Rollout, losses, run_ranks, state

from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

pytestmark = pytest.mark.integration
ENV = ("env=tabletop", "env.init_params.camera_heights=32", "env.init_params.camera_widths=32")
CAMERA = ("env.init_params.camera_names=[front]",)
TRAIN = ("env.train.task_ids=[0]", "env.train.total_num_envs=4", "env.train.max_episode_steps=8")
PLAYED = ("env.eval.task_ids=[0]", "env.eval.total_num_envs=2", "env.eval.max_episode_steps=8")
STEP = (
    *("runner.max_steps=1", "runner.val_check_interval=-1"),
    *("actor.global_batch_size=4", "actor.micro_batch_size=4"),
)
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")


def configure(command, folder, name, *words):
    cfg = load_config(command, [f"runner.output_dir={folder}", f"runner.experiment_name={name}", *QUIET, *words])
    check_components(cfg)
    return cfg


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Create a folder with demonstrations, and a policy of each kind trained on them for two steps."""
    folder = tmp_path_factory.mktemp("lerobot")
    words = (*ENV, *CAMERA, "env.train.task_ids=[0]", f"collect.out={folder}/demos", "collect.episodes=4")
    collect(configure("collect", folder, "collected", *words))
    for kind, changes in (("act", {}), ("diffusion", {"n_obs_steps": 2})):
        start = fresh(kind, folder / f"start_{kind}", **changes)
        history = changes.get("n_obs_steps", 1)
        model = (f"model={kind}", f"model.path={start}", "model.num_action_chunks=4")
        data = (f"data.path={folder}/demos", f"data.history={history}", "runner.max_steps=2")
        sft(configure("sft", folder, kind, *data, *model, "actor.global_batch_size=4", "actor.micro_batch_size=4"))
    return folder


def trained(folder, kind):
    model = (f"model={kind}", f"model.path={folder}/start_{kind}", "model.num_action_chunks=4")
    return (f"ckpt={folder}/{kind}", *model)


def policy(folder, name, step):
    return folder / name / "checkpoints" / f"step_{step:06d}" / "policy"


def test_sft_writes_the_statistics_of_its_demonstrations(runs):
    from safetensors.numpy import load_file

    for kind in ("act", "diffusion"):
        folder = policy(runs, kind, 2)
        found = load_file(folder / "policy_preprocessor_step_3_normalizer_processor.safetensors")
        demos = json.loads((runs / kind / "start" / "dataset_statistics.json").read_text())
        (entry,) = demos.values()
        assert np.allclose(found["action.std"], entry["action"]["std"])
        assert found["observation.images.front.mean"].shape == (3, 1, 1)
        assert "embodyrl_init" not in json.loads((folder / "config.json").read_text())


def test_history_policy_acts_in_a_history_environment(runs):
    words = (*trained(runs, "diffusion"), *ENV, *CAMERA, *PLAYED, "eval.episodes_per_task=2")
    history = ("env.history=2",)
    result = evaluate(configure("eval", runs, "evaluated", *words, *history))
    assert result.overall.episodes == 2


def test_act_is_evaluated_with_temporal_ensembling(runs):
    words = (*trained(runs, "act"), *ENV, *CAMERA, *PLAYED, "eval.episodes_per_task=2")
    chunks = ("env.ensemble_chunk=6",)
    model = ("model.temporal_ensemble=true", "model.num_action_chunks=1")
    assert evaluate(configure("eval", runs, "averaged", *words, *chunks, *model)).overall.episodes == 2


@pytest.mark.parametrize(
    "method",
    [("algorithm=sac", "model.likelihood=dsrl"), ("algorithm=sac", "model.likelihood=residual"), ("algorithm=ppo",)],
)
def test_rl_updates_only_the_trainable_modules(runs, method):
    from safetensors.torch import load_file

    name = "_".join(method).replace("=", "_").replace(".", "_")
    more = ("algorithm.replay_size=200", "algorithm.learning_starts=8") if "algorithm=sac" in method else ()
    words = (*trained(runs, "act"), *ENV, *CAMERA, *TRAIN, *PLAYED, *STEP, *method, *more)
    train(configure("train", runs, name, *words))
    before, after = (policy(runs, *where) for where in (("act", 2), (name, 1)))
    old, new = (load_file(f / "model.safetensors") for f in (before, after))
    changed = [key for key in old if not torch.equal(old[key], new[key])]
    assert bool(changed) == (method == ("algorithm=ppo",))
    assert (after / "embodyrl_heads.safetensors").is_file()


def test_lerobot_policy_on_two_ranks_matches_one(tmp_path):
    start = fresh("diffusion", tmp_path / "start")
    model = ("model=diffusion", f"model.path={start}", "model.num_action_chunks=4", "~model.use_proprio=")
    learning = ("algorithm=ppo", "algorithm.update_epoch=1", "actor.optim.lr=0.001", "actor.micro_batch_size=3")
    words = (*model, "~model.num_images_in_input=", *learning)
    run_ranks(tmp_path, 1, [Rollout(name="one", words=words, last=1)])
    run_ranks(tmp_path, 2, [Rollout(name="two", words=words, last=1)])
    one, two = (losses(tmp_path / name)[-1] for name in ("one", "two"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-5)
    a, b = (state(tmp_path / name / "saved") for name in ("one", "two"))
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=0, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
