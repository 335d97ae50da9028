"""Disaggregated rollout and actor processes match a run in one process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load
from text_runs import text_config
from toy_runs import TOY_OFT, comparable, resume_toy, rows, running_crew, train_toy, weights

from embodyrl.commands.train import train

WORDS = (
    *("runner.deterministic=true", "env.kwargs.goal=0.7", "actor.optim.lr=0.001", "model.precision=fp32"),
    *("runner.max_steps=3", "runner.val_check_interval=1", "runner.save_interval=1", "checkpoint.keep=3"),
)
APART = ("rollout.mode=disaggregated",)
SOUP = ("model.path=assets/openvla_oft_tiny_soup", "model.unnorm_key=libero_object_no_noops")
BF16 = pytest.param((*TOY_OFT, "model.precision=bf16"))
LORA = (*TOY_OFT, *SOUP, "model.is_lora=true", "model.lora.r=4")


def same(one, other, *, steps=3):
    return comparable(one) == comparable(other) and weights(one, steps) == weights(other, steps)


@pytest.mark.integration
@pytest.mark.parametrize("model", [(), pytest.param(BF16, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_disaggregated_run_matches_one_process(tmp_path, model):
    words = (*WORDS, *model, "algorithm=ppo", "runner.max_steps=2")
    together, apart = (train_toy(tmp_path, *words, *more, name=f"r{len(more)}") for more in ((), APART))
    assert same(together, apart, steps=2)
    assert all(row["actor/grad_norm"] > 0 for row in rows(together)[1:]), "each step had new weights to act with"


@pytest.mark.integration
def test_disaggregated_adapters_match_one_process(tmp_path):
    together, apart = (train_toy(tmp_path, *WORDS, *LORA, *more, name=f"r{len(more)}") for more in ((), APART))
    assert same(together, apart)


@pytest.mark.integration
@pytest.mark.parametrize("offload", [pytest.param("false", marks=pytest.mark.slow), "true"], ids=["whole", "sharded"])
def test_disaggregated_bfloat16_text_matches_one_process(tmp_path, offload):
    words = ("model.precision=bf16", f"actor.fsdp.cpu_offload={offload}", "actor.optim.lr=0.001")
    together, apart = (
        train(text_config(tmp_path, *words, *more, f"runner.experiment_name=r{len(more)}")).run for more in ((), APART)
    )
    gaps = [[row["actor/logprob_gap"] for row in rows(run)] for run in (together, apart)]
    assert gaps[0] == gaps[1]


def test_only_adapter_weights_are_sent_after_the_first_sync(tmp_path):
    with running_crew(tmp_path, *LORA, *APART, "algorithm=ppo") as stage:
        policy = stage.workers.policy
        first = [part for bucket in policy._fill_buckets(policy._bucket_arena) for part in bucket]
        stage.workers.scheduler.publish(0)
        later = [part for bucket in policy._fill_buckets(policy._bucket_arena) for part in bucket]
        heads = ("value_head", "proprio_projector", "action_head")
        assert later
        assert all(".lora_" in part.name or part.name.startswith(heads) for part in later)
        assert sum(p.stop - p.start for p in later) < 0.1 * sum(p.stop - p.start for p in first)


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_several_disaggregated_ranks_match_one_process(tmp_path):
    words = (*WORDS, "env.train.total_num_envs=8", "runner.max_steps=2")
    spread = ("launcher=local", "launcher.env_workers=1", "actor.fsdp.size=2", "rollout.num_workers=2")
    one = train_toy(tmp_path, *words, name="one")
    many = train_toy(tmp_path, *words, *APART, *spread, name="many")
    # Ranks add gradients in another order, as micro_batch_size=1 does in one process. Weights of the first step differ
    # by 2e-7; the second step may draw another token where a random number lies on the border between two.
    for a, b in zip(rows(one)[:2], rows(many)[:2], strict=True):
        for name in a.keys() & {"actor/loss", "actor/grad_norm", "train/return", "eval/return"}:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
    for name, data in weights(one, 1).items():
        others = load(weights(many, 1)[name])
        for key, tensor in load(data).items():
            torch.testing.assert_close(others[key], tensor, rtol=0, atol=2e-6)
    _, first, second = rows(many)
    assert first["actor/kl"] > 1e-6, "the weights moved"
    assert second["actor/logprob_gap"] < 1e-5, "and every process acts with the new ones"


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_asynchronous_run_collects_stale_chunks_during_training(tmp_path):
    words = ("launcher=local", "launcher.env_workers=1", "env.train.total_num_envs=8", "runner.max_steps=4")
    lag = ("algorithm=decoupled", "algorithm.max_staleness=1", "algorithm.group_size=2", "actor.fsdp.size=2")
    logged = rows(train_toy(tmp_path, *words, *lag, *APART))
    shares = [{k: v for k, v in row.items() if k.startswith("rollout/staleness/")} for row in logged]
    assert all(set(share) <= {"rollout/staleness/0", "rollout/staleness/1"} for share in shares)
    assert any(share.get("rollout/staleness/1") for share in shares), "nothing was drawn ahead"


@pytest.mark.integration
def test_resumed_disaggregated_run_acts_with_saved_weights(tmp_path):
    whole = train_toy(tmp_path, *WORDS, *APART, name="whole")
    train_toy(tmp_path, *WORDS, *APART, "runner.max_steps=2", name="half")
    assert same(whole, resume_toy(tmp_path / "half", "runner.max_steps=3"))
