"""Weight transfer to rollout processes: complete, in the right dtype, for any bucket size."""

from __future__ import annotations

import pytest
import torch

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import build_bucket_layout, fill_buckets
from embodyrl.channels.messages import LoadWeightsRequest, PublishRequest, RankInfo
from embodyrl.learners.ranks import Ranks
from embodyrl.policies.protocol import get_weights_version
from embodyrl.workers.weights import describe_weights, load_bucket, publish


def module(dtype, seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Linear(7, 3, bias=False)).to(dtype)
    net.register_parameter("scale", torch.nn.Parameter(torch.tensor(float(seed), dtype=torch.float32)))
    return net


@pytest.mark.parametrize("size", [16, 48, 100, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_dtype_of_the_receiver(size, dtype):
    trained, acting = module(torch.float32, 1), module(dtype, 2)
    bucket_arena = Arena.create(build_bucket_layout(size), 2)
    wanted = describe_weights(acting)
    for parts in fill_buckets(wanted, size):
        assert all(part.offset + (part.stop - part.start) * 2 <= size for part in parts)
        record_ref = bucket_arena.allocate()
        publish(
            PublishRequest(sequence=0, record_ref=record_ref, parts=parts), trained, Ranks(RankInfo()), bucket_arena
        )
        load_bucket(LoadWeightsRequest(sequence=0, record_ref=record_ref, parts=parts), acting, bucket_arena)
        bucket_arena.free([record_ref])
    for (name, a), b in zip(trained.named_parameters(), acting.parameters(), strict=True):
        assert torch.equal(a.to(b.dtype), b), name
    bucket_arena.close()


def test_every_weight_element_is_sent_once():
    weights = describe_weights(module(torch.float32, 1))
    parts = [part for bucket in fill_buckets(weights, 64) for part in bucket]
    for weight in weights:
        spans = sorted((part.start, part.stop) for part in parts if part.name == weight.name)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == weight.count


def test_weight_transfer_updates_the_version():
    """vLLM loads the module's weights when their version has changed."""
    acting, bucket_arena = module(torch.float32, 2), Arena.create(build_bucket_layout(4096), 1)
    before = get_weights_version(acting)
    (parts,) = fill_buckets(describe_weights(acting), 4096)
    request = LoadWeightsRequest(sequence=0, record_ref=bucket_arena.allocate(), parts=parts)
    publish(
        PublishRequest(sequence=0, record_ref=request.record_ref, parts=parts), acting, Ranks(RankInfo()), bucket_arena
    )
    load_bucket(request, acting, bucket_arena)
    assert get_weights_version(acting) > before
    bucket_arena.close()


def test_running_statistics_are_transferred():
    """Statistics have no gradient but change with each update; buffers that are not saved are constants."""

    def normalized(mean: float) -> torch.nn.Module:
        net = torch.nn.Linear(2, 2)
        net.register_buffer("mean", torch.full((3,), mean))
        net.register_buffer("table", torch.full((3,), mean), persistent=False)
        return net.requires_grad_(False)

    trained, acting, bucket_arena = normalized(1.0), normalized(2.0), Arena.create(build_bucket_layout(4096), 1)
    weights = describe_weights(trained)
    assert {weight.name: weight.trained for weight in weights} == {"weight": False, "bias": False, "mean": True}
    (parts,) = fill_buckets(weights, 4096)
    request = LoadWeightsRequest(sequence=0, record_ref=bucket_arena.allocate(), parts=parts)
    publish(
        PublishRequest(sequence=0, record_ref=request.record_ref, parts=parts), trained, Ranks(RankInfo()), bucket_arena
    )
    load_bucket(request, acting, bucket_arena)
    assert torch.equal(acting.mean, trained.mean)
    assert not torch.equal(acting.table, trained.table)
    bucket_arena.close()
