"""`benchmarks/gpu.py` counts the same FLOPs as the fake GPU and stays within its memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from fakegpu import MEMORY, FakeGpu

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu as benchmark

ARGS = {"size": "tiny", "layers": 2, "dtype": "bf16", "device": "cuda:1", "compile": False, "recompute": True}


@pytest.mark.parametrize("graphs", [False, True])
def test_counted_flops_match_the_kernels(graphs: bool, tmp_path: Path) -> None:
    """FLOPs of adapted layers, also with CUDA graphs."""
    with FakeGpu(scalar=1.0) as gpu:
        policy = benchmark.build(tmp_path, "lora", argparse.Namespace(**ARGS, graphs=graphs))
        counted = benchmark.count_forward(policy)
        seen = benchmark.observe(1)
        tokens = policy.act(seen, noise=None).tokens
        gpu.reset()
        with torch.no_grad():
            policy.score(seen, tokens)
    assert counted == pytest.approx(gpu.flops, rel=0.01)
    assert counted > 0


def test_full_fine_tuning_benchmark_uses_fewer_layers_if_memory_is_short() -> None:
    assert benchmark.fitting_layers(7_540_000_000, MEMORY) == 2
    assert benchmark.fitting_layers(7_540_000_000, 140 * 10**9) is None
    assert benchmark.fitting_layers(1_500_000_000, MEMORY) is None
