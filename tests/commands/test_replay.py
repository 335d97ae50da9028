"""A dumped step comes out the same again, and whatever was changed in it is seen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from toy_runs import toy_config, train_toy

from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.cli.main import main
from embodyrl.commands.dump import dump_folder, dumped_steps, read_dump
from embodyrl.commands.replay import gap, replay
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.run_plan import build_run_plan

TRUST = ("trust=true",)
WORDS = ("rollout.dump=true", "runner.save_interval=1", "actor.optim.lr=0.001", "env.kwargs.goal=0.7")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("dumped"), *WORDS, "runner.max_steps=4", "checkpoint.keep=2")


@pytest.mark.parametrize("step", [1, 4])
def test_the_same_weights_give_the_same_numbers(run, step):
    result = replay(run, step, overrides=TRUST)
    assert result.problems == ()
    assert len(result.episode) >= 4
    assert gap(result.advantage).max() == 0.0
    assert gap(result.logprob).max() < 1e-4
    assert set(result.version.tolist()) == {step - 1}
    assert bool(result.metrics) == read_dump(run, step).batch.has_signal
    for then, now in result.metrics.values():
        assert then == pytest.approx(now, rel=1e-3, abs=1e-5)


def test_dumps_go_with_their_checkpoints(run):
    # The first step needs no checkpoint; those after steps 1 and 2 were pruned, 2 only after the last dump.
    assert dumped_steps(run) == [1, 3, 4]
    with pytest.raises(CheckpointError, match="there are: 1, 3, 4"):
        replay(run, 2, overrides=TRUST)


def _change(tree, what):
    if what == "reward":
        tree["episodes"]["reward"][0] += 1.0
    elif what == "advantage":
        tree["batch"]["advantage"] *= -1.0
    else:
        tree["fields"][what][:] = np.roll(tree["fields"][what], 1, axis=0)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("reward", "advantages of"),
        ("advantage", "advantages of"),
        ("tokens", "log-probabilities of"),
        ("images", "log-probabilities of"),
        ("logprob", "log-probabilities of"),
    ],
)
def test_what_was_changed_is_seen(run, capsys, what, said):
    folder = dump_folder(run, 4)
    before = load_state(folder, "dump")
    tree = load_state(folder, "dump")
    _change(tree, what)
    save_state(folder, "dump", tree)
    try:
        assert main(["replay", "trust=true", str(run), "--step", "4", "--json"]) == 3
    finally:
        save_state(folder, "dump", before)
    captured = capsys.readouterr()
    assert said in captured.err
    assert any(said in problem for problem in json.loads(captured.out)["problems"])


def test_the_command_shows_a_table(run, capsys):
    assert main(["replay", "trust=true", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "step 4 of" in printed
    assert "logprob_gap" in printed
    assert "grad_norm" in printed


@pytest.mark.integration
def test_values_and_a_reference_policy_are_replayed_too(tmp_path):
    words = ("algorithm=ppo", "algorithm.group_size=1", "algorithm.kl_beta=0.1")
    result = replay(train_toy(tmp_path, *WORDS, *words), 2, overrides=TRUST)
    assert result.problems == ()
    assert {"value_loss", "kl"} <= set(result.metrics)


def test_episodes_that_go_on_in_the_next_step_are_replayed_with_what_came_before(tmp_path):
    """Fails where the sums of their rewards, by whose spread rewards are divided, begin anew."""
    words = ("algorithm=ppo", "algorithm.group_size=1", "algorithm.normalize_returns=true", "algorithm.gamma=0.9")
    goes_on = ("env.train.continue_episodes=true", "env.train.max_steps_per_rollout_epoch=4")
    words += ("env.use_rel_reward=false", "env.kwargs.echo=true", "algorithm.normalize_advantages=false")
    run = train_toy(tmp_path, *WORDS, *words, *goes_on, "runner.max_steps=2")
    result = replay(run, 2, overrides=TRUST)
    assert any(e.earlier is not None for e in read_dump(run, 2).collection.episodes)
    assert result.problems == ()
    assert gap(result.advantage).max() < 1e-6


def test_a_dump_of_unbounded_size_is_refused(tmp_path):
    words = ("rollout.dump=true", "algorithm.rollout_epoch=10000", "env.train.total_num_envs=1000")
    with pytest.raises(ConfigError, match="a step may need"):
        build_run_plan(toy_config(tmp_path, *words), training=True)


def test_chunks_of_older_weights_are_marked_and_not_judged(tmp_path):
    words = ("algorithm.max_staleness=1", "actor.optim.lr=0.01", "runner.max_steps=3")
    result = replay(train_toy(tmp_path, *WORDS, *words), 3, overrides=TRUST)
    assert result.stale.any()
    assert result.stale.tolist() == (result.version < 2).tolist()
    assert result.problems == ()
