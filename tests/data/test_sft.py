"""SFT of the tiny OpenVLA-OFT policy on demonstrations collected by real workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import start_cli
from safetensors.torch import load_file
from toy_env import toy_spec
from toy_runs import TOY_CNN, TOY_COLLECT, TOY_EVAL, TOY_OFT, rows, weights

from embodyrl.api.acting import load_policy
from embodyrl.checkpoint.store import read_loop
from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.run_folder import resolve_initial_weights, weight_banner_lines
from embodyrl.commands.sft import SftResult, sft
from embodyrl.commands.sft_data import _make_samples, action_log_std, data_statistics, load_samples
from embodyrl.commands.sft_setup import load_inputs, sft_banner_lines
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import ConfigError, NonFiniteError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.schema import Config
from embodyrl.types import GripperConvention, PolicySpec

HARD = ("env.kwargs.tasks=2", "env.kwargs.goal=2.6")
"""Two tasks with opposite actions; the expert needs six of eight steps."""
EVAL = (*(word for word in TOY_EVAL if word not in TOY_CNN), *TOY_OFT)
MODEL = ("model.num_action_chunks=4", "model.num_images_in_input=1", "model.use_proprio=false")
SMALL = ("actor.global_batch_size=8", "actor.micro_batch_size=8", "actor.optim.warmup_steps=2")


TOY_POLICY = PolicySpec(
    name="p",
    num_action_chunks=4,
    action_dim=7,
    tokens_per_chunk=28,
    gripper=GripperConvention(open=1.0, closed=0.0),
)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collect twenty demonstrations."""
    folder = tmp_path_factory.mktemp("collect")
    places = (f"collect.out={folder}/demos", f"runner.output_dir={folder}/runs")
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]", "collect.episodes=20")
    collect(load_config("collect", [*TOY_COLLECT, *HARD, *places, *quiet]))
    return folder / "demos"


def words(folder: Path, demos: Path, *overrides: str) -> list[str]:
    places = (f"data.path={demos}", f"runner.output_dir={folder}", "runner.experiment_name=sft")
    pairs = any(word.startswith("objective.name=") for word in overrides)  # are never augmented
    seen = () if pairs else ("data.image_aug=false",)
    return [*places, *MODEL, *SMALL, *seen, "launcher=inline", "runner.logger.backends=[jsonl]", *overrides]


def config(folder: Path, demos: Path, *overrides: str) -> Config:
    cfg = load_config("sft", words(folder, demos, *overrides))
    check_components(cfg)
    return cfg


def train(folder: Path, demos: Path, *overrides: str) -> SftResult:
    return sft(config(folder, demos, *overrides))


@pytest.fixture(scope="module")
def trained(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> SftResult:
    folder = tmp_path_factory.mktemp("sft")
    return train(folder, demos, "runner.max_steps=60", "runner.val_check_interval=30", "actor.optim.lr=1e-3")


def success(folder: Path, *overrides: str) -> float:
    places = (f"runner.output_dir={folder}", "launcher=inline", "runner.logger.backends=[jsonl]")
    settings = ("eval.episodes_per_task=4", "env.eval.total_num_envs=4")
    cfg = load_config("eval", [*EVAL, *HARD, *places, *settings, *overrides])
    check_components(cfg)
    return evaluate(cfg).overall.success_once


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_sft_on_twenty_demonstrations_solves_the_tasks(trained: SftResult, tmp_path: Path) -> None:
    assert read_loop(trained.checkpoint) == (60, [-trained.metrics["eval/loss"]], 60), "the least loss is the best"
    assert trained.metrics["train/token_accuracy"] > 0.95
    assert trained.metrics["eval/token_accuracy"] > 0.95
    first = rows(trained.run)[0]
    assert first["step"] == 0
    assert first["eval/token_accuracy"] < 0.2
    assert trained.metrics["eval/loss"] < 0.2 * first["eval/loss"]
    untrained = success(tmp_path / "before")
    assert untrained <= 0.5, "one constant action cannot go right and left"
    assert success(tmp_path / "run", f"ckpt={trained.run}") == 1.0
    # The statistics belong to the weights, whichever way the checkpoint is named.
    assert success(tmp_path / "path", f"model.path={trained.checkpoint}/policy") == 1.0


@pytest.mark.integration
def test_suggested_eval_command_contains_the_trust_flag(trained: SftResult) -> None:
    """Fails if the printed arguments are rejected: `toy_env:FACTORY` is code that the run itself does not name."""
    said = (trained.run / "logs" / "events.log").read_text()
    assert f"embodyrl eval ckpt={trained.run} trust=true\n" in said
    with pytest.raises(ConfigError, match="trust=true"):
        load_config("eval", [f"ckpt={trained.run}"], base=trained.run / "config.yaml")
    assert load_config("eval", [f"ckpt={trained.run}", "trust=true"], base=trained.run / "config.yaml")


@pytest.mark.integration
def test_l1_head_learns_the_demonstrations(demos: Path, tmp_path: Path) -> None:
    l1 = "model.action_head=l1"
    result = train(tmp_path, demos, l1, "runner.max_steps=60", "runner.val_check_interval=60", "actor.optim.lr=2e-4")
    first, last = rows(result.run)[0], result.metrics
    assert last["eval/loss"] < 0.2 * first["eval/loss"]
    assert (result.checkpoint / "policy/action_head.safetensors").exists()
    assert success(tmp_path / "run", f"ckpt={result.run}", l1) == 1.0


@pytest.mark.integration
@pytest.mark.parametrize("lora", [False, True])
def test_run_with_a_head_that_its_initial_weights_lack_is_evaluated(trained, demos, tmp_path, lora):
    words = ("model.action_head=l1", f"model.path={trained.checkpoint}/policy", f"model.is_lora={str(lora).lower()}")
    result = train(tmp_path, demos, *words, "runner.max_steps=1")
    assert not (result.run / "start" / "action_head.safetensors").exists()
    success(tmp_path / "run", f"ckpt={result.run}", f"model.path={result.run}/start", "model.action_head=l1")
    load_policy(result.run, "trust=true")


@pytest.mark.integration
def test_sft_checkpoint_contains_training_data_statistics(trained: SftResult, demos: Path, tmp_path: Path) -> None:
    policy = trained.checkpoint / "policy"
    assert {"config.json", "model.safetensors", "tokenizer.json", "dataset_statistics.json"} <= {
        p.name for p in policy.iterdir()
    }
    assert "embodyrl_init" not in json.loads((policy / "config.json").read_text())
    statistics = json.loads((policy / "dataset_statistics.json").read_text())
    assert list(statistics) == ["libero_10_no_noops"]
    entry = statistics["libero_10_no_noops"]
    assert entry["action"]["mask"] == [True] * 6 + [False]
    assert (entry["action"]["q01"][0], entry["action"]["q99"][0]) == (-0.5, 0.5)
    assert entry["num_trajectories"] == 18, "two of twenty are held out"
    held_in = load_samples(config(tmp_path, demos), toy_spec(2), TOY_POLICY)[0]
    seen = held_in.demos.state[held_in.steps].astype(np.float64)
    assert entry["num_transitions"] == len(seen) < len(held_in.demos.state)
    assert entry["proprio"]["mean"] == pytest.approx(seen.mean(axis=0).tolist(), rel=1e-6)
    assert entry["proprio"]["mean"] != pytest.approx(held_in.demos.state.mean(axis=0).tolist(), rel=1e-3)
    assert entry["action"]["mean"][6] == 0.5, "the toy's gripper is half open: 0.5 in the policy's convention"
    assert len(entry["proprio"]["q99"]) == 1


def test_sft_checkpoint_rejects_other_inputs(trained: SftResult, tmp_path: Path) -> None:
    policy = shutil.copytree(trained.checkpoint / "policy", tmp_path / "policy")
    cfg = load_config("eval", [*EVAL, *HARD, *MODEL, f"ckpt={policy}", f"model.path={trained.run / 'start'}"])
    env = build_run_plan(cfg, training=False).env
    assert resolve_initial_weights(cfg, env) == policy
    inputs = json.loads((policy / "embodyrl_inputs.json").read_text())
    assert inputs["cameras"] == list(env.cameras.names[:1])
    assert inputs["longest_demonstration"] == 6
    assert weight_banner_lines(cfg, policy, env) == [
        ("weights", f"{policy} instead of those of {trained.run / 'start'}")
    ]
    short = cfg.updated({"env.eval.max_episode_steps": 5})
    assert (
        "has 6 steps, more than env.eval.max_episode_steps=5"
        in dict(weight_banner_lines(short, policy, env))["warning"]
    )
    assert inputs["gripper"] == {"open": 1.0, "closed": 0.0, "index": -1, "binary": False}
    (policy / "embodyrl_inputs.json").write_text(json.dumps(inputs | {"cameras": ["elsewhere"]}))
    with pytest.raises(ConfigError, match=r"env.init_params.camera_names=\[elsewhere\]"):
        resolve_initial_weights(cfg, env)
    assert resolve_initial_weights(cfg.updated({"model.cameras": list(env.cameras.names[:1])}), env) == policy


def test_sft_banner_warns_of_weights_trained_on_other_inputs(trained: SftResult, demos: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(trained.checkpoint / "policy", tmp_path / "policy")
    cfg = config(tmp_path, demos, f"model.path={policy}")
    assert "warning" not in dict(sft_banner_lines(cfg))
    inputs = json.loads((policy / "embodyrl_inputs.json").read_text())
    (policy / "embodyrl_inputs.json").write_text(json.dumps(inputs | {"cameras": ["elsewhere"]}))
    warning = dict(sft_banner_lines(cfg))["warning"]
    camera = inputs["cameras"][0]
    assert warning.startswith("The policy was trained on the cameras [elsewhere] of 'toy', ")
    assert f"has [{camera}]. SFT adapts" in warning
    assert "warning" not in dict(sft_banner_lines(cfg.updated({"model.cameras": [camera]})))


def test_validation_episodes_are_excluded_from_training(demos: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path, demos, "data.val_share=0.25")
    training, validation = load_samples(cfg, toy_spec(2), TOY_POLICY)
    assert validation is not None
    assert not set(training.steps) & set(validation.steps)
    both = np.sort(np.concatenate([training.steps, validation.steps]))
    np.testing.assert_array_equal(both, np.arange(len(training.demos.action)))
    episode = np.searchsorted(training.demos.stop, validation.steps, side="right")
    assert len(set(episode.tolist())) == 5
    assert not set(episode) & set(np.searchsorted(training.demos.stop, training.steps, side="right"))
    np.testing.assert_array_equal(training.actions[..., 6], 0.5)
    np.testing.assert_array_equal(training.actions[:, 0, :6], training.demos.action[training.steps, :6])
    # Fails where they are drawn anew from all folders, as each round of DAgger would.
    more, again = load_samples(
        config(tmp_path, demos, "data.val_share=0.25", f"data.more=[{demos}]"), toy_spec(2), TOY_POLICY
    )
    assert again is not None
    np.testing.assert_array_equal(again.steps, validation.steps)
    assert len(more.steps) == len(training.steps) + len(training.demos.action)
    whole, none = load_samples(config(tmp_path, demos, "data.val_share=0"), toy_spec(2), TOY_POLICY)
    assert none is None
    assert len(whole.steps) == len(whole.demos.action)


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_dpo_prefers_better_episodes_of_an_initial_state(tmp_path: Path) -> None:
    """DPO on episodes of a noisy expert from four states: the loss decreases from ln 2; whole states are held out."""
    places = (f"collect.out={tmp_path}/demos", f"runner.output_dir={tmp_path}/runs", "model.expert_noise=1.5")
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]", "collect.episodes=24", "collect.filter=all")
    collect(load_config("collect", [*TOY_COLLECT, *HARD[1:], *places, *quiet]))
    few = ("objective.name=dpo", "objective.beta=0.3", "runner.max_steps=30", "runner.val_check_interval=30")
    result = train(tmp_path, tmp_path / "demos", *few, "actor.optim.lr=5e-4")
    first = rows(result.run)[0]
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["eval/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert result.metrics["train/loss"] <= 0.6
    cfg = config(tmp_path, tmp_path / "demos", "objective.name=dpo", "data.val_share=0.25")
    training, validation = load_samples(cfg, toy_spec(1), TOY_POLICY)
    assert validation is not None
    sides = [
        part.demos.reset_id[np.searchsorted(part.demos.stop, part.steps, side="right")]
        for part in (training, validation)
    ]
    assert not {*sides[0]} & {*sides[1]}
    assert (sides[0][::2] == sides[0][1::2]).all()


def test_pairs_with_an_action_of_another_actor_are_skipped(demos: Path, tmp_path: Path) -> None:
    """The better episode of the only pair is by a person."""
    shown = load_demonstrations(demos)
    frames, stop = np.arange(shown.stop[1]), shown.stop[:2]
    two = replace(
        shown,
        **{name: getattr(shown, name)[frames] for name in ("images", "state", "action", "reward", "instruction")},
        success=frames < stop[0],
        actor=np.where(frames < stop[0], Actor.person, Actor.expert),
        start=shown.start[:2],
        stop=stop,
        reset_id=np.zeros(2, np.int64),
    )
    found = [
        len(_make_samples(config(tmp_path, demos, *words), two, [0, 1], toy_spec(1), TOY_POLICY).steps) > 0
        for words in (("objective.name=dpo",), ("objective.name=dpo", "data.actors=[expert]"))
    ]
    assert found == [True, False]


def test_episodes_of_different_environments_are_not_paired(demos: Path, tmp_path: Path) -> None:
    """Reset ids of two environments may be equal: fails if only the sizes of observations and actions are compared."""
    other = shutil.copytree(demos, tmp_path / "other")
    for name in ("embodyrl.json", "info.json"):
        text = (other / "meta" / name).read_text()
        (other / "meta" / name).write_text(text.replace('"toy"', '"toy two"'))
    cfg = config(tmp_path, demos, f"data.more=[{other}]")
    assert load_samples(cfg, toy_spec(2), TOY_POLICY)[0].demos.num_episodes == 40
    cfg = config(tmp_path, demos, f"data.more=[{other}]", "objective.name=dpo")
    with pytest.raises(ConfigError, match=r"/other differs from data.path in name"):
        load_samples(cfg, toy_spec(2), TOY_POLICY)


def test_normalization_statistics_match_their_definition() -> None:
    rng = np.random.default_rng(0)
    actions, states = rng.normal(size=(1000, 7)).astype(np.float32), rng.normal(size=(1000, 3)).astype(np.float32)
    entry = data_statistics(actions, states, toy_spec(), 5)
    assert entry["action"]["q01"] == pytest.approx(np.quantile(actions.astype(np.float64), 0.01, axis=0).tolist())
    assert entry["proprio"]["max"] == states.max(axis=0).tolist()
    assert (entry["num_transitions"], entry["num_trajectories"]) == (1000, 5)


def comparable(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(run)]


LENGTH = ("runner.max_steps=6", "runner.val_check_interval=3", "runner.save_interval=3", "data.image_aug=true")


@pytest.fixture(scope="module")
def straight(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("straight"), demos, *LENGTH).run


@pytest.mark.integration
def test_resumed_sft_matches_an_uninterrupted_run(straight: Path, demos: Path, tmp_path: Path) -> None:
    run = train(tmp_path, demos, *LENGTH, "runner.max_steps=3", "actor.optim.schedule=constant").run
    sft(load_saved_config(run, ["runner.max_steps=6"]), resume=run)
    other = train(tmp_path / "other", demos, *LENGTH, "actor.optim.schedule=constant").run
    assert comparable(run) == comparable(other)
    assert weights(run, 6) == weights(other, 6)
    assert weights(run, 6) != weights(straight, 6), "the cosine schedule makes a difference"


@pytest.mark.integration
def test_mismatched_resume_does_not_change_the_run(demos: Path, tmp_path: Path) -> None:
    places = (f"data.path={demos}", f"runner.output_dir={tmp_path}", "launcher=inline", "model=mlp")
    run = sft(load_config("sft", [*places, *SMALL, "runner.max_steps=1"])).run
    saved = (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"--resume .*hidden is \[64, 64\] \(this run needs \[8\]"):
        sft(load_saved_config(run, ["model.hidden_sizes=[8]", "runner.max_steps=2"]), resume=run)
    assert (run / "config.yaml").read_text() == saved
    assert sft(load_saved_config(run, ["runner.max_steps=2"]), resume=run).step == 2


@pytest.mark.integration
def test_sft_from_random_weights_begins_with_the_deviation_of_the_actions(demos: Path, tmp_path: Path) -> None:
    words = [f"data.path={demos}", f"runner.output_dir={tmp_path}", "launcher=inline", "model=mlp", *SMALL]
    cfg = load_config("sft", [*words, "runner.max_steps=1", "actor.optim.lr=0.0"])
    material = load_inputs(cfg, tmp_path / "start")
    std = material.train.actions[:, 0].std(0)
    found = load_file(sft(cfg).run / "checkpoints/step_000001/policy/model.safetensors")["head.log_std"]
    assert std[0] > 0.1
    np.testing.assert_allclose(found.exp().numpy(), np.where(std > 0, std, 1.0), rtol=1e-4)
    low, high = material.env.action.bounds
    for bounds, half in (((-9.0, 9.0), 9.0), ((-9.0, np.inf), 1.0)):
        action = replace(material.env.action, low=(bounds[0], *low[1:]), high=(bounds[1], *high[1:]))
        found = action_log_std(material.train, replace(material.env, action=action))
        assert found[0] == pytest.approx(np.log(std[0] / half), rel=1e-4)


@pytest.mark.integration
def test_killed_sft_resumes_from_its_checkpoint(straight: Path, demos: Path, tmp_path: Path) -> None:
    command = start_cli("sft", *words(tmp_path, demos, *LENGTH), cwd=tmp_path)
    saved = tmp_path / "sft/checkpoints/step_000003/manifest.json"
    try:
        command.wait_for(saved)
    finally:
        command.stop()
    sft(load_saved_config(tmp_path / "sft", []), resume=tmp_path / "sft")
    assert comparable(tmp_path / "sft") == comparable(straight)
    assert weights(tmp_path / "sft", 6) == weights(straight, 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sft_on_two_ranks_matches_one_rank_and_resumes_on_one_rank(demos: Path, tmp_path: Path) -> None:
    words = (*LENGTH, "actor.optim.schedule=constant", "actor.micro_batch_size=3")
    one = train(tmp_path / "one", demos, *words).run
    two = train(tmp_path / "two", demos, *words, "runner.max_steps=3", "launcher=local", "actor.fsdp.size=2").run
    sft(load_saved_config(two, ["runner.max_steps=6", "actor.fsdp.size=1"]), resume=two)
    assert len(comparable(one)) == 3
    for a, b in zip(comparable(one), comparable(two), strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    for step in (3, 6):
        a, b = (load_file(run / f"checkpoints/step_00000{step}/policy/model.safetensors") for run in (one, two))
        for name in a:
            torch.testing.assert_close(b[name], a[name], rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.integration
def test_equal_seeds_give_equal_sft_runs(straight: Path, demos: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "same", demos, *LENGTH).run
    assert weights(again, 6) == weights(straight, 6)
    other = train(tmp_path / "other", demos, *LENGTH, "seed=1").run
    assert weights(other, 6) != weights(straight, 6)


def test_sft_callback_gets_every_step_and_can_stop_the_run(demos: Path, tmp_path: Path) -> None:
    losses: list[float] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> bool:
        losses.append(metrics["actor/loss"])
        return step == 2

    result = sft(config(tmp_path, demos, "runner.max_steps=5", "runner.val_check_interval=-1"), on_step=on_step)
    assert (result.step, result.checkpoint.name, len(losses)) == (2, "step_000002", 2)
    assert rows(result.run)[-1]["actor/loss"] == pytest.approx(sum(losses) / 2)


def test_sft_gradient_is_independent_of_micro_batches(demos: Path, tmp_path: Path) -> None:
    one = ("runner.max_steps=1", "runner.val_check_interval=-1")
    whole = rows(train(tmp_path / "whole", demos, *one).run)[-1]
    parts = rows(train(tmp_path / "parts", demos, *one, "actor.micro_batch_size=3").run)[-1]
    assert parts["actor/loss"] == pytest.approx(whole["actor/loss"], rel=1e-5)
    assert parts["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-4)


def test_divergence_has_its_own_exit_code(demos: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"Lower actor.optim.lr"):
        train(tmp_path, demos, "actor.optim.lr=1000", "runner.max_steps=5", "runner.val_check_interval=-1")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.path=null"], "data.path is not set"),
    ],
)
def test_sft_reports_missing_and_unused_keys(demos: Path, tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, demos, *overrides)


def test_mismatched_components_are_rejected_before_sft(demos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads 2 camera images, but env 'toy' has 1"):
        train(tmp_path / "images", demos, "model.num_images_in_input=2")
    with pytest.raises(ConfigError, match=r"SFT cannot train model_type 'scripted' without a checkpoint"):
        sft(load_config("sft", [f"data.path={demos}", "model=scripted", f"runner.output_dir={tmp_path}"]))


def test_rejected_sft_run_creates_no_folder(demos: Path, tmp_path: Path) -> None:
    name = ["runner.experiment_name=kept", f"runner.output_dir={tmp_path}"]

    def begin(*more: str) -> None:
        with pytest.raises(ConfigError, match="without a checkpoint"):
            sft(load_config("sft", [f"data.path={demos}", "model=scripted", *name, *more]))

    begin()
    assert list(tmp_path.iterdir()) == [], "its name is free again"
    (tmp_path / "kept" / "mine").mkdir(parents=True)
    begin("runner.on_existing=resume")
    assert (tmp_path / "kept" / "mine").is_dir()


def test_banner_without_images_omits_image_size(demos: Path, tmp_path: Path) -> None:
    play = ["env=gym", "env.id=CartPole-v1", "model=random", "collect.episodes=2", "collect.filter=all"]
    quiet = ["launcher=inline", "runner.logger.backends=[jsonl]", f"runner.output_dir={tmp_path}/runs"]
    collect(load_config("collect", [*play, *quiet, f"collect.out={tmp_path}/states"]))
    facts = dict(sft_banner_lines(load_config("sft", [f"data.path={tmp_path}/states", "model=mlp"])))
    assert facts["frames"] == "4 numbers of state, no images"
    assert (
        "augmentation on" in dict(sft_banner_lines(load_config("sft", [f"data.path={demos}", "model=cnn"])))["frames"]
    )


def test_banner_lists_the_cameras_that_the_policy_reads(tmp_path: Path) -> None:
    quiet = ["launcher=inline", "runner.logger.backends=[jsonl]", f"runner.output_dir={tmp_path}/runs"]
    cameras = "env.init_params.camera_names=[wrist,front]"
    out = f"collect.out={tmp_path}/both"
    collect(load_config("collect", ["env=tabletop", cameras, "collect.episodes=1", *quiet, out]))
    frames = dict(sft_banner_lines(load_config("sft", [f"data.path={tmp_path}/both", "model=flow_small"])))["frames"]
    assert frames.startswith("wrist 112x112")
    assert frames.endswith("unused: front")


def test_banner_shows_the_stopping_condition(demos: Path, tmp_path: Path) -> None:
    """Fails if the banner omits epochs that end the run."""
    few = ("runner.max_epochs=1", "runner.max_steps=30", "actor.global_batch_size=80", "actor.micro_batch_size=80")
    assert (
        dict(sft_banner_lines(config(tmp_path, demos, *few)))["training"] == "1 epochs, at most 30 steps, of 80 samples"
    )
    assert dict(sft_banner_lines(config(tmp_path, demos, *few[1:])))["training"] == "30 steps of 80 samples"
    done = train(tmp_path, demos, *few)
    assert done.step < 30
    sft(load_saved_config(done.run, [], command="sft"), resume=done.run)
    assert f"step {done.step} of {done.step}; raise runner.max_epochs or" in (done.run / "logs/events.log").read_text()


@pytest.mark.parametrize("words", ["data.more=[{}]", "data.val_path={}"])
def test_folder_without_data_set_is_rejected_before_the_run(tmp_path, demos, words):
    (tmp_path / "half/meta").mkdir(parents=True)
    for name, said in (("half", r"meta/info.json is missing"), ("none", "not a folder")):
        with pytest.raises(ConfigError, match=f"{tmp_path}/{name} is .*{said}"):
            sft_banner_lines(config(tmp_path, demos, words.format(tmp_path / name)))


def test_sft_does_not_modify_demonstrations(demos: Path) -> None:
    """Collected data are in the environment's units; the gripper conversion changes only a copy."""
    np.testing.assert_array_equal(load_demonstrations(demos).action[:, 6], 0.0)


@pytest.mark.integration
def test_sft_reshuffles_each_epoch_and_augments_each_step(tmp_path: Path) -> None:
    """Two epochs over one episode, sample by sample, with constant weights: losses identify the samples."""
    places = (f"collect.out={tmp_path}/demos", f"runner.output_dir={tmp_path}/runs", "launcher=inline")
    few = ("collect.episodes=1", "env.train.task_ids=[0]", "runner.logger.backends=[jsonl]")
    collect(load_config("collect", [*TOY_COLLECT, *HARD, *places, *few]))
    count = len(load_demonstrations(tmp_path / "demos").action)
    still = ("actor.optim.lr=0", "runner.val_check_interval=-1", "actor.global_batch_size=1", "runner.max_epochs=2")

    def losses(name: str, *more: str) -> tuple[list[float], list[float]]:
        """Return the losses of each of the two epochs."""
        found: list[float] = []
        cfg = config(tmp_path / name, tmp_path / "demos", *still, "actor.micro_batch_size=1", *more)
        result = sft(cfg, on_step=lambda _, row: found.append(row["actor/loss"]))
        (*_, row) = rows(result.run)
        assert row["time/samples_per_s"] == pytest.approx(1 / row["time/step"])
        assert len(found) == 2 * count, "epochs end a run before its steps do"
        return found[:count], found[count:]

    first, again = losses("plain", "data.shuffle=false")
    assert first == pytest.approx(again)
    one, two = losses("shuffled")
    assert one != pytest.approx(two, rel=1e-5)
    assert sorted(one) == pytest.approx(sorted(two), rel=1e-4), "each epoch shows every sample"
    assert sorted(one) == pytest.approx(sorted(first), rel=1e-4)
    one, two = losses("seen", "data.shuffle=false", "data.image_aug=true")
    assert one != pytest.approx(two, rel=1e-5)
