"""CUDA graphs: few batch sizes, and a fallback if capture fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from settings import model_of

from embodyrl.config.paths import assets_dir
from embodyrl.config.shared import Precision
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.graphs import GraphedForward, pad_batch, round_up_batch_size
from embodyrl.policies.openvla_oft.settings import to_oft_settings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, Observation


@pytest.fixture
def policy():
    env = EnvSpec(
        name="e",
        action=ActionSpec(dim=7),
        tasks=("pick up the milk",),
        states_per_task=(1,),
        cameras=CameraSpec(names=("a",), size=(64, 64)),
        benchmark=BenchmarkSpec(unnorm_key="libero_10"),
        state_dim=8,
    )
    path = str(assets_dir() / "openvla_oft_tiny")
    cfg = model_of(model_type="openvla_oft", path=path, precision=Precision.fp32, use_proprio=True, cuda_graphs=True)
    return FACTORY.build(cfg, PolicyRequest(env=env, value_dim=1, device="cpu", seed=0, fresh_heads=True))


def observe(count: int) -> Observation:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 1, 64, 64, 3), dtype=np.uint8)
    return Observation(
        images=images, state=rng.random((count, 8), np.float32), instructions=("pick up the milk",) * count
    )


def test_cuda_graphs_use_a_small_number_of_batch_sizes():
    sizes = {round_up_batch_size(count) for count in range(1, 257)}
    assert len(sizes) == 16
    assert all(count <= round_up_batch_size(count) <= 1.5 * count for count in range(2, 257))


@torch.no_grad()
def test_padded_graph_batch_matches_the_unpadded_batch(policy):
    inputs = policy._build_inputs(observe(5))
    filled = pad_batch(inputs, round_up_batch_size(5))
    assert len(filled.pixels) == len(filled.state) == 6
    for whole, part in zip(policy._forward(filled), policy._forward(inputs), strict=True):
        torch.testing.assert_close(whole[:5], part, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_failed_graph_capture_falls_back_with_a_warning(policy):
    inputs, recorded = policy._build_inputs(observe(5)), GraphedForward(policy._forward)
    with pytest.warns(UserWarning, match=r"model\.cuda_graphs is ignored, because .*CUDAGraph"):
        first = recorded(inputs)
    second = recorded(inputs)
    for logits in (first, second):
        assert torch.equal(logits[0], policy._forward(inputs)[0])


@torch.no_grad()
def test_graph_capture_out_of_memory_is_raised(policy, monkeypatch):
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", full)
    with pytest.raises(torch.OutOfMemoryError):
        GraphedForward(policy._forward)(policy._build_inputs(observe(5)))


def test_openvla_captures_no_graphs():
    """Otherwise, autocast would not cache the cast weights between tokens."""
    assert not to_oft_settings(model_of(model_type="openvla", cuda_graphs=True)).cuda_graphs
