"""The actor: independence of batch splits, the reference policy and the learning-rate schedule."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from toy_runs import TOY_OFT, rows, train_toy

import embodyrl
from embodyrl.errors import EmbodyError
from embodyrl.learners.policy_gradient import split_evenly
from embodyrl.learners.schedule import Schedule
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import list_micro_batches

WORDS = ("env.kwargs.goal=0.7", "env.train.total_num_envs=8", "runner.deterministic=true", "actor.optim.lr=0.001")
COMPARED = ("actor/loss", "actor/policy_loss", "actor/entropy", "actor/kl", "actor/ratio", "actor/grad_norm")


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches_do_not_change_the_gradient(tmp_path, aggregation):
    words = (*WORDS, f"algorithm.loss_agg_func={aggregation}", "actor.global_batch_size=16")
    whole = rows(train_toy(tmp_path, *words, "actor.micro_batch_size=16", name="whole"))
    parts = rows(train_toy(tmp_path, *words, "actor.micro_batch_size=3", name="parts"))
    assert whole[0]["actor/optimizer_steps"] == 1
    for key in COMPARED:
        assert parts[0][key] == pytest.approx(whole[0][key], rel=1e-4, abs=1e-6), key


def test_optimizer_steps_are_epochs_times_batches(tmp_path):
    words = (*WORDS, "env.kwargs.echo=true", "runner.max_steps=1", "algorithm.update_epoch=3")
    row = rows(train_toy(tmp_path, *words, "actor.global_batch_size=6", "actor.micro_batch_size=6"))[0]
    assert row["actor/optimizer_steps"] == 3 * 3, "16 samples in batches of at most 6, three times"
    assert row["actor/ratio"] != 1, "later epochs are off-policy"


def test_reference_keeps_the_initial_weights(tmp_path):
    words = (
        *WORDS,
        "algorithm.kl_beta=0.01",
        "runner.max_steps=3",
        "env.kwargs.echo=true",
        "actor.global_batch_size=16",
    )
    logged = rows(train_toy(tmp_path, *words))
    assert logged[0]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert logged[2]["actor/ref_kl"] > 1e-6


def test_reference_path_loads_another_policy(tmp_path):
    """The KL to the run's initial policy is zero, to its final policy positive; the saved config has the folder."""
    words = (*WORDS, "runner.max_steps=2", "env.kwargs.echo=true", "algorithm.kl_beta=0.01")
    words = (*words, "actor.global_batch_size=16")
    first = train_toy(tmp_path, *words, "runner.save_interval=1", "actor.optim.lr=0.01", name="first")
    reference = f"algorithm.reference_path={first}"
    away = rows(train_toy(tmp_path, *words, reference, name="away"))[0]["actor/ref_kl"]
    again = train_toy(tmp_path, *words, reference, f"ckpt={first}", name="again")
    assert away > 1e-6
    assert rows(again)[0]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert "step_000002/policy" in (again / "config.yaml").read_text()


def test_reference_with_other_action_statistics_is_rejected(tmp_path):
    folder = tmp_path / "teacher"
    run = train_toy(tmp_path, *WORDS, *TOY_OFT, "runner.max_steps=1", name="first")
    saved = run / "checkpoints" / "step_000001" / "policy"
    shutil.copytree(saved, folder)
    file = folder / "dataset_statistics.json"
    told = json.loads(file.read_text())
    for entry in told.values():
        entry["action"] = {k: [2.0 * x for x in v] if k != "mask" else v for k, v in entry["action"].items()}
    file.write_text(json.dumps(told))
    with pytest.raises(EmbodyError, match="action statistics differ"):
        train_toy(tmp_path, *WORDS, *TOY_OFT, "algorithm.kl_beta=0.01", f"algorithm.reference_path={folder}")


@pytest.mark.parametrize(("total", "largest"), [(1, 4), (4, 4), (5, 4), (10, 4), (160, 7), (0, 3)])
def test_even_split_sums_to_the_total(total, largest):
    assert split_evenly(total, largest, 3) == sorted(split_evenly(total, largest, 3), reverse=True)
    assert sum(split_evenly(total, largest, 3)) == total
    assert len(split_evenly(total, largest, 3)) == min(3, total)
    parts = split_evenly(total, largest)
    assert sum(parts) == total
    assert max(parts, default=0) <= largest
    assert not parts or max(parts) - min(parts) <= 1
    assert len(parts) == -(-total // largest)


@pytest.mark.parametrize(
    ("schedule", "more", "expected"),
    [
        ("constant", {}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", {}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", {}, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("wsd", {}, [0.5, *[1.0] * 18, 0.5]),
        ("wsd", {"decay_ratio": 0.5, "min_lr_ratio": 0.2}, [0.5, 1.0, 1.0, 1.0, 0.2 + 0.8 * 2 / 3, 0.2 + 0.8 / 3]),
        ("linear", {"min_lr_ratio": 0.1}, [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("constant", {"warmup_steps": 0, "warmup_ratio": 0.5}, [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", {"warmup_steps": 0, "warmup_ratio": 1 / 3}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule, more, expected):
    cfg = OptimSettings(**{"schedule": schedule, "warmup_steps": 2} | more)
    plan = Schedule(cfg, total=len(expected))
    seen = []
    for position in range(len(expected)):
        seen.append(plan.factor(position))
        plan.step()
    assert seen == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("typed", "first"), [(None, 0.25), (2, 0.5), (0, 1.0)])
def test_model_sets_the_default_warm_up(typed, first):
    assert Schedule(OptimSettings(warmup_steps=typed), total=9, warmup=4).factor(0) == first


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("model=openvla_oft_tiny", 10),
        ("model=flow_small", 10),
        ("model=diffusion", 10),
        ("env=text/copy model=causal_lm model.path=folder", 10),
        ("env=text/copy model=causal_lm_tiny", 0),
        ("env=gym model=mlp", 0),
    ],
)
def test_pretrained_policies_warm_up_by_default(words, steps):
    assert embodyrl.compose("train", *words.split()).model.warmup_steps == steps


@pytest.mark.parametrize(
    "words",
    [("env.kwargs.echo=true", "actor.global_batch_size=10"), ("env.kwargs.goal=0.5", "actor.global_batch_size=8")],
)
def test_learning_rate_schedule_ends_with_the_run(tmp_path, words):
    """16 samples in batches of 10 are two steps, not 16 // 10; episodes that end early have fewer samples."""
    steps = ("runner.max_steps=3", "actor.optim.schedule=linear")
    logged = rows(train_toy(tmp_path, *WORDS, *steps, *words))
    assert all(row["actor/optimizer_steps"] > 0 for row in logged)
    for row in logged:
        left = row["actor/lr"] / 0.001
        assert 1 - row["step"] / 3 < left <= 1 - (row["step"] - 1) / 3, "the rate that the last optimizer step took"


def test_minibatches_setting_determines_the_optimizer_steps(tmp_path):
    words = (*WORDS, "env.kwargs.echo=true", "runner.max_steps=1", "algorithm.update_epoch=2")
    words += ("~actor.global_batch_size=", "actor.minibatches=5")
    assert rows(train_toy(tmp_path, *words))[0]["actor/optimizer_steps"] == 2 * 5


def test_token_budget_includes_padding():
    cost = np.random.default_rng(0).integers(1, 50, 64)
    batches = list_micro_batches(cost, 8, 120)
    assert sorted(np.concatenate(batches).tolist()) == list(range(64))
    assert all(len(b) * cost[b].max() <= 120 for b in batches)
    assert len(batches) < 64 * 50 / 120
    assert [b.tolist() for b in list_micro_batches(np.array([9, 300, 9]), 8, 120)] == [[1], [0, 2]]
    assert [b.tolist() for b in list_micro_batches(cost[:5], 2, None)] == [[0, 1], [2, 3], [4]]
