"""Implicit Q-learning on data sets that this project collects: transitions, runs, resume and rejected settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from toy_env import toy_spec
from toy_runs import rows

from embodyrl.algorithms.iql.estimator import IqlSettings
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import UpdateRequest
from embodyrl.commands.collect import collect
from embodyrl.commands.train import train
from embodyrl.data.reader import Demonstrations
from embodyrl.errors import ConfigError, NonFiniteError
from embodyrl.learners.iql import values
from embodyrl.learners.iql.learner import IqlLearner
from embodyrl.learners.iql.transitions import build_transitions, find_terminal_episodes
from embodyrl.learners.protocol import LearnerContext
from embodyrl.learners.settings import OptimSettings
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.workers.policy_host import PolicyHost

FIRST = "checkpoints/step_000001/policy/model.safetensors"
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]", "runner.val_check_interval=-1")
PENDULUM = ("env=gym", "env.id=Pendulum-v1", "env.train.max_episode_steps=10")
SMALL = (
    *("model=mlp", "algorithm=iql", "model.hidden_sizes=[8]", "actor.global_batch_size=8", "actor.micro_batch_size=8"),
    *("algorithm.updates_per_sample=3", "algorithm.critic_width=8", "runner.max_steps=4", *QUIET),
)


def episodes(lengths: list[int], won: list[bool]) -> Demonstrations:
    """Return episodes whose states and rewards count the frames."""
    stop = np.cumsum(lengths)
    frames = np.arange(stop[-1])
    success = np.zeros(len(frames), np.bool_)
    success[stop[won] - 1] = True
    return Demonstrations(
        images=np.zeros((len(frames), 0, 0, 0, 3), np.uint8),
        state=frames[:, None].astype(np.float32),
        action=frames[:, None].astype(np.float32),
        reward=frames.astype(np.float32),
        success=success,
        start=stop - lengths,
        stop=stop,
        instruction=np.array(["go"] * len(frames), object),
        actor=np.zeros(len(frames), np.int64),
        reset_id=np.arange(len(lengths)),
    )


def test_dataset_episode_is_terminal_at_success_or_if_shorter_than_the_longest():
    assert find_terminal_episodes(episodes([3, 4, 4, 2], [True, True, False, False])).tolist() == [
        True,
        True,
        False,
        True,
    ]
    longer = replace(episodes([4], [True]), success=np.array([False, True, True, True]))
    assert find_terminal_episodes(longer).tolist() == [False], "a later success does not end an episode"


def test_iql_transitions_match_a_hand_computed_table():
    """Chunks of two actions; the first episode is won, the second one is cut by the time limit of its data set."""
    demos, found = build_transitions([episodes([3], [True]), episodes([4], [False])], 2, 0.5, 10.0)
    assert len(demos.action) == 7
    assert found.start.tolist() == [0, 1, 2, 3, 4]
    assert found.after.tolist() == [2, 2, 2, 5, 6]
    assert found.reward.tolist() == [10.0, 30.0, 20.0, 10.0, 30.0]
    assert found.discount.tolist() == [0.5, 0.0, 0.0, 0.5, 0.5]


def test_iql_values_fit_the_smaller_target_critic():
    """The loss of V by hand, and of the advantages: expectile of min(Q1, Q2) - V."""
    rng, rules = torch.Generator().manual_seed(0), IqlSettings(expectile=0.8, critic_width=8)
    inputs = torch.randn(60, 3, generator=rng), torch.randn(60, 2, generator=rng)
    found = values.IqlValues(*inputs, rules, OptimSettings(value_lr=0.0), seed=1)
    for parameter in found.targets.parameters():
        torch.nn.init.normal_(parameter, generator=rng)
    normal = [(x - x.mean(0)) / x.std(0, correction=0) for x in inputs]
    with torch.no_grad():
        both, guess = found.targets(*normal), found.value(normal[0], normal[0][:, :0])[0]
    assert {*(both[0] < both[1]).tolist()} == {True, False}
    gap = torch.minimum(*both) - guess
    wanted = (torch.where(gap < 0, 0.2, 0.8) * gap**2).mean()
    rows = torch.arange(60)
    advantage, numbers = found.update(rows, rows, torch.zeros(60), torch.zeros(60))
    assert numbers["value_loss"] == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(advantage, gap)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    words = (*PENDULUM, "model=random", "collect.filter=all", "collect.episodes=3", *QUIET[:2])
    collect(load_config("collect", [*words, f"collect.out={folder}/set", f"runner.output_dir={folder}/runs"]))
    return f"{folder}/set"


def weights(run: Path, name: str = "policy/model.safetensors") -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in load_file(run / "checkpoints/step_000004" / name).items()}


def run_iql(folder: Path, data: str, name: str, *words: str) -> Path:
    known = (f"algorithm.demonstrations=[{data}]", f"runner.output_dir={folder}", f"runner.experiment_name={name}")
    return train(load_config("train", [*PENDULUM, *SMALL, *known, *words])).run


@pytest.mark.integration
def test_resumed_iql_run_matches_an_uninterrupted_run(tmp_path, data):
    words = ("runner.save_interval=2", "runner.deterministic=true", "checkpoint.keep=9", "model.normalize_state=true")
    whole = run_iql(tmp_path, data, "whole", *words)
    known = (f"algorithm.demonstrations=[{data}]", f"runner.output_dir={tmp_path}", "runner.experiment_name=half")
    started = load_config("train", [*PENDULUM, *SMALL, *known, *words])
    half = train(started, on_step=lambda step, _: step == 2).run
    train(load_saved_config(half, ["trust=true"]), resume=half)
    for name in ("policy/model.safetensors", "critics.safetensors"):
        assert weights(half, name) == weights(whole, name), name


@pytest.mark.parametrize("loss", ["critic_loss", "expectile_loss"])
def test_exception_in_an_iql_loss_ends_the_training(tmp_path, data, monkeypatch, loss):
    def broken(*_: object) -> None:
        raise ArithmeticError("the loss was called")

    monkeypatch.setattr(values, loss, broken)
    with pytest.raises(Exception, match="the loss was called"):
        run_iql(tmp_path, data, "run")


@pytest.fixture
def host(tmp_path, data):
    words = [*PENDULUM, *SMALL, f"algorithm.demonstrations=[{data}]", f"runner.output_dir={tmp_path}"]
    run_plan = build_run_plan(load_config("train", words), training=True)
    arena = Arena.create(run_plan.layout, run_plan.capacity)
    made = PolicyHost(build_policy_init(run_plan, arena, None))
    yield made, UpdateRequest(step=1, record_refs=arena.allocate_all(1), episode=(0,))
    made.close()
    arena.close()


@pytest.mark.parametrize(
    ("bad", "updated", "said"),
    [
        ("value", set(), "left the weights unchanged"),
        ("critics", {"value"}, "policy and critics are unchanged, but the value network was updated"),
        ("policy", {"value", "critics"}, "the policy is unchanged, but critics and value network were updated"),
    ],
)
def test_non_finite_gradient_error_names_the_updated_networks(host, bad, updated, said):
    actor, request = host
    learner = actor._learner
    parts = {"value": learner._values.value, "critics": learner._values.critics, "policy": actor.policy.module}
    next(iter(parts[bad].parameters())).register_hook(lambda gradient: gradient * math.nan)
    before = {name: [p.detach().clone() for p in part.parameters()] for name, part in parts.items()}
    with pytest.raises(NonFiniteError, match=said):
        list(learner.update(request))
    moved = {
        name
        for name, part in parts.items()
        if not all(torch.equal(one, p) for one, p in zip(before[name], part.parameters(), strict=True))
    }
    assert moved == updated
    assert all(p.isfinite().all() for part in parts.values() for p in part.parameters())


@pytest.mark.integration
def test_iql_with_temperature_zero_is_behavior_cloning(tmp_path, data):
    """Rewards change the policy through the advantage weights only."""
    runs = {
        (temperature, scale): weights(
            run_iql(
                *(tmp_path, data, f"t{temperature}s{scale}", f"algorithm.temperature={temperature}"),
                f"algorithm.reward_scale={scale}",
            )
        )
        for temperature in (0, 3)
        for scale in (1, 2)
    }
    assert runs[0, 1] == runs[0, 2]
    assert runs[3, 1] != runs[3, 2]


def test_iql_rejects_missing_data_and_discrete_actions():
    for words, what in (
        (("env.id=Pendulum-v1", "model=mlp"), "algorithm.demonstrations is empty"),
        (("env.id=CartPole-v1", "model=mlp"), "real-valued actions"),
    ):
        with pytest.raises(ConfigError, match=what):
            build_run_plan(load_config("train", ["env=gym", "algorithm=iql", *words]), training=True)


def test_each_dataset_has_its_own_time_limit():
    _, found = build_transitions([episodes([3, 3], [False, False]), episodes([5], [False])], 2, 0.5, 1.0)
    assert found.discount.tolist() == [0.5] * 5, "an episode of 3 steps is cut, although another set has 5"


def test_micro_batches_do_not_change_an_iql_update(tmp_path, data):
    """Weights differ between samples; gradients are those of the whole batch up to rounding."""
    words = ("runner.max_steps=1", "runner.save_interval=1", "algorithm.temperature=1", "actor.optim.lr=0.01")
    whole, parts = (
        load_file(run_iql(tmp_path, data, f"of_{size}", *words, f"actor.micro_batch_size={size}") / FIRST)
        for size in (8, 2)
    )
    losses = [rows(tmp_path / f"of_{size}")[0]["actor/loss"] for size in (8, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, weight in whole.items():
        np.testing.assert_allclose(parts[name], weight, atol=1e-5)


def test_policy_is_in_evaluation_mode_after_an_iql_update(host):
    actor, request = host
    learner, seen = actor._learner, []
    learner._imitate = lambda frames, own=learner._imitate: seen.append(actor.policy.module.training) or own(frames)
    list(learner.update(request))
    assert all(seen)
    assert not actor.policy.module.training


def test_each_training_step_samples_different_transitions(host):
    actor, request = host
    learner, drawn = actor._learner, []
    learner._evaluate = lambda chosen, own=learner._evaluate: drawn.append(chosen.tolist()) or own(chosen)
    for step in (1, 2):
        list(learner.update(replace(request, step=step)))
    assert drawn[0] != drawn[3]


def test_iql_imitates_all_predicted_actions(host):
    """Policies may predict more actions than they execute."""
    actor, request = host
    policy, learner, lengths = actor.policy, actor._learner, []
    policy.spec = replace(policy.spec, imitated=5)
    longer = IqlLearner(
        LearnerContext(
            trainer=learner._trainer,
            arena=actor._arena,
            algorithm=Algorithm(learner._settings),
            seed=0,
            env=toy_spec(1),
        )
    )
    own = policy.imitate
    policy.imitate = lambda obs, actions: lengths.append(actions.shape[1]) or own(obs, actions[:, :1])
    list(longer.update(request))
    assert set(lengths) == {5}
