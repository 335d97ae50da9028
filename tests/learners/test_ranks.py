"""Actor ranks: losses, weights and checkpoints are independent of the number of ranks and of sharding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rank_work import Rollout, losses, run_ranks, state
from toy_runs import TOY_OFT, toy_config

from embodyrl.channels.messages import RankInfo
from embodyrl.learners.precision import find_layers
from embodyrl.learners.training import order_by_prompt, split_micro_batches
from embodyrl.plan.build import build_run_plan

FULL = ("algorithm=ppo", "actor.optim.lr=0.001", "actor.micro_batch_size=4")
SOUP = ("model.path=assets/openvla_oft_tiny_soup", "model.unnorm_key=libero_object_no_noops")
# Rates at which training itself does not blow rounding errors up: with 1e-4 another micro-batch differs as much.
LORA = (
    *FULL,
    *TOY_OFT,
    *SOUP,
    "model.is_lora=true",
    "model.lora.r=4",
    "actor.optim.lr=2e-5",
    "actor.optim.value_lr=3e-4",
)


def same(one, other, *, tolerance=1e-5):
    for a, b in zip(losses(one), losses(other), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"memory_gib"}:
            # The norm of gradients jumps where a ratio crosses its clip: seen 1.3e-4 apart with weights 2e-6 apart.
            rel = 1e-3 if name == "grad_norm" else 1e-4
            assert b[name] == pytest.approx(a[name], rel=rel, abs=tolerance), name
    a, b = state(one / "saved"), state(other / "saved")
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_two_ranks_match_one(tmp_path):
    words = (*FULL, "actor.micro_batch_size=2", "actor.gradient_checkpointing=true")
    run_ranks(tmp_path, 2, [Rollout(name="two", words=words, last=3), Rollout(name="first", words=FULL, last=1)])
    second = Rollout(name="second", words=FULL, first=1, last=2, load=tmp_path / "first" / "saved")
    run_ranks(tmp_path, 1, [Rollout(name="one", words=FULL, last=3), second])
    same(tmp_path / "one", tmp_path / "two")
    run_ranks(tmp_path, 2, [Rollout(name="third", words=FULL, first=2, last=3, load=tmp_path / "second" / "saved")])
    assert losses(tmp_path / "third")[0]["loss"] == pytest.approx(losses(tmp_path / "one")[2]["loss"], abs=1e-5)
    a, b = state(tmp_path / "one" / "saved"), state(tmp_path / "third" / "saved")
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=0, atol=1e-5)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_ranks_exchange_metrics_after_the_same_steps(tmp_path):
    """One of the ranks has two of three samples; all ranks must exchange metrics after the same steps."""
    words = (*FULL, "actor.global_batch_size=3", "actor.micro_batch_size=3", "algorithm.old_logprob=recompute")
    job = Rollout(name="run", words=words, last=1)
    tokens = 2 * build_run_plan(toy_config(tmp_path, *words), training=True).policy.tokens_per_chunk
    run_ranks(tmp_path / "two", 2, [replace(job, at_once=tokens)], deadline_s=120)
    run_ranks(tmp_path / "one", 1, [job])
    same(tmp_path / "one" / "run", tmp_path / "two" / "run")


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_non_finite_loss_on_one_rank_stops_all(tmp_path):
    words = (*FULL, "faults.on_nonfinite=skip", "algorithm.update_epoch=1")
    jobs = [Rollout(name="before", words=words, last=0), Rollout(name="bad", words=words, last=1, poison=True)]
    run_ranks(tmp_path, 2, jobs, host="127.0.0.2")  # as between hosts: through the gate
    (metrics,) = losses(tmp_path / "bad")
    assert (metrics["skipped_nonfinite"], metrics["optimizer_steps"]) == (1, 0)
    before, after = state(tmp_path / "before" / "saved"), state(tmp_path / "bad" / "saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_respects_the_token_budget_with_its_own_samples(world):
    costs, budget = np.array([9, 1, 2, 8, 1, 1, 7, 3, 1, 12]), 12
    ranks = [split_micro_batches(costs, RankInfo(rank=rank, world=world), 4, budget) for rank in range(world)]
    assert len({len(parts) for parts in ranks}) == 1, "all take part in each collective"
    counted = [rows for parts in ranks for rows, counts in parts if counts]
    assert sorted(np.concatenate(counted).tolist()) == list(range(10))
    assert all(len(rows) * costs[rows].max() <= budget for rows in counted)
    assert all(len(rows) == 1 for parts in ranks for rows, counts in parts if not counts)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("words", [FULL, pytest.param(LORA)], ids=["full", "lora"])
def test_one_two_and_four_ranks_have_equal_weights_after_twenty_steps(tmp_path, words):
    variants = {
        "micro": ("actor.micro_batch_size=3",),
        "kept": ("actor.fsdp.reshard_after_forward=false", "actor.gradient_checkpointing=true"),
        "replicas": ("actor.fsdp.shard_size=1",),
        "offload": ("actor.fsdp.cpu_offload=true",),
    }
    run_ranks(tmp_path, 1, [Rollout(name="one", words=words, last=20), Rollout(name="half1", words=words, last=10)])
    jobs = [Rollout(name=f"{name}2", words=(*words, *more), last=20) for name, more in variants.items()]
    back = Rollout(name="to2", words=words, first=10, last=20, load=tmp_path / "half1" / "saved")
    run_ranks(tmp_path, 2, [*jobs, back, Rollout(name="half2", words=words, last=10)], deadline_s=3000)
    hsdp = Rollout(name="hsdp4", words=(*words, "actor.fsdp.shard_size=2"), last=20)
    run_ranks(tmp_path, 4, [Rollout(name="four", words=words, last=20), hsdp], deadline_s=3000)
    forth = Rollout(name="to1", words=words, first=10, last=20, load=tmp_path / "half2" / "saved")
    run_ranks(tmp_path, 1, [forth])
    for other in (*(f"{name}2" for name in variants), "four", "hsdp4"):
        same(tmp_path / "one", tmp_path / other)
    for other in ("to1", "to2"):
        a, b = state(tmp_path / "one" / "saved"), state(tmp_path / other / "saved")
        for key in a:
            torch.testing.assert_close(b[key], a[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("count", "world", "micro"), [(1, 4, 2), (7, 2, 2), (8, 4, 8), (9, 2, 3), (160, 7, 3)])
def test_samples_are_split_evenly_over_ranks(count, world, micro):
    dealt = [
        split_micro_batches(np.ones(count, np.int64), RankInfo(rank=rank, world=world), micro, None)
        for rank in range(world)
    ]
    assert len({len(batches) for batches in dealt}) == 1
    counted = np.concatenate([rows for batches in dealt for rows, counts in batches if counts])
    assert sorted(counted) == list(range(count))
    assert all(0 < len(rows) <= micro for batches in dealt for rows, _ in batches)


def test_equal_prompts_are_adjacent_and_the_longest_come_first():
    prompts = np.array([[7, 1], [7, 2], [7, 1], [7, 3], [7, 2], [7, 3]], np.uint8)
    order = order_by_prompt(prompts, np.array([4, 9, 5, 3, 8, 3]))
    assert order.tolist() == [1, 4, 0, 2, 3, 5]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_token_budget_holds_on_every_rank(world):
    cost = np.random.default_rng(0).integers(10, 400, 50)
    dealt = [split_micro_batches(cost, RankInfo(rank=rank, world=world), 1, 800) for rank in range(world)]
    assert len({len(batches) for batches in dealt}) == 1
    counted = [rows for batches in dealt for rows, counts in batches if counts]
    assert sorted(np.concatenate(counted)) == list(range(50))
    assert all(len(rows) * cost[rows].max() <= 800 for rows in counted)
    assert len(dealt[0]) <= -(-len(split_micro_batches(cost, RankInfo(), 1, 800)) // world) + 1


def test_rank_batches_partition_the_global_batch():
    whole = RankInfo().get_slices(11, 3)
    shared = [part for rank in range(2) for part in RankInfo(rank=rank, world=2).get_slices(11, 3)]
    assert sorted(shared, key=lambda part: part.start) == whole


def test_sharded_layers_are_elements_of_outermost_module_lists():
    inner = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    block = torch.nn.Sequential(inner)
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleList([block, torch.nn.Linear(1, 1)]), "b": torch.nn.Linear(1, 1)})
    assert find_layers(model) == list(model["a"])
