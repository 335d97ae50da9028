"""Transfer of weight buckets to another host: only the used bytes are sent."""

from __future__ import annotations

import multiprocessing
import pickle
import threading

import pytest
import torch

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import build_bucket_layout, fill_buckets
from embodyrl.channels.messages import LoadWeightsRequest, PublishRequest, RankInfo
from embodyrl.cluster.ray_cluster.rows import Rows, copy_in, copy_out, write_rows
from embodyrl.learners.ranks import Ranks
from embodyrl.workers.weights import describe_weights, load_bucket, publish

SIZE = 1 << 20
"""Bytes of a bucket."""


def sent(rows: list[Rows]) -> tuple[list[Rows], int]:
    """Send rows through a socket; return the received rows and their bytes."""
    left, right = multiprocessing.Pipe()
    sender = threading.Thread(target=left.send, args=(rows,))
    sender.start()
    data = right.recv_bytes()
    sender.join()
    left.close()
    right.close()
    return pickle.loads(data), len(data)


def adapted(seed: int) -> torch.nn.Module:
    """Return a frozen layer with a trained low-rank adapter."""
    torch.manual_seed(seed)
    base = torch.nn.Linear(256, 256).requires_grad_(False)
    return torch.nn.ModuleDict({"base": base, "down": torch.nn.Linear(256, 4), "up": torch.nn.Linear(4, 256)})


@pytest.mark.parametrize("trained_only", [False, True], ids=["all", "adapter"])
def test_weight_transfer_sends_exactly_the_weights(trained_only):
    learner, acting = adapted(1), adapted(2)
    pools = {
        host: (Arena.create(build_bucket_layout(16), 1), Arena.create(build_bucket_layout(SIZE), 2)) for host in "abc"
    }
    arenas = {host: both[1] for host, both in pools.items()}
    wanted = [weight for weight in describe_weights(acting) if weight.trained or not trained_only]
    (parts,) = fill_buckets(wanted, SIZE)
    record_ref = arenas["b"].allocate()
    write, read = (
        PublishRequest(record_ref=record_ref, parts=parts),
        LoadWeightsRequest(record_ref=record_ref, parts=parts),
    )
    write_rows(pools["a"], copy_in(pools["b"], write))
    publish(write, learner, Ranks(RankInfo()), arenas["a"])
    # From the learner's host to the driver's, then to the host of the rollout process.
    rows, first = sent(copy_out(pools["a"], write))
    write_rows(pools["b"], rows)
    rows, second = sent(copy_in(pools["b"], read))
    write_rows(pools["c"], rows)
    load_bucket(read, acting, arenas["c"])
    size = sum(weight.count * weight.item_bytes for weight in wanted)
    assert size < 10_000 or not trained_only
    for count in (first, second):
        assert size < count < size + 2_000
    for weight in wanted:
        assert torch.equal(acting.get_parameter(weight.name), learner.get_parameter(weight.name)), weight.name
    for arena in (arena for both in pools.values() for arena in both):
        arena.close()
