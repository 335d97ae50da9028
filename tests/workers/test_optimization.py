"""The optimizer's step, whatever order a gradient has in memory."""

from __future__ import annotations

import pytest
import torch

from embodyrl.workers.settings import OptimSettings
from embodyrl.workers.training import Optimization


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_a_gradient_counts_by_its_place_and_not_by_its_memory(order: str) -> None:
    """Adam's first step has the size of the rate and the gradient's sign; on a CPU torch's fused one errs."""
    layer = torch.nn.Linear(7, 5, bias=False)
    before = layer.weight.detach().clone()
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    layer.weight.grad = gradient if order == "rows" else gradient.t().contiguous().t()
    rate = 0.01
    optim = OptimSettings(lr=rate, schedule="constant", weight_decay=0.0, warmup_steps=0, clip_grad=1e6)
    Optimization(layer, optim, 10).step(0.0)
    assert torch.allclose(layer.weight.detach() - before, -rate * gradient.sign(), atol=1e-5)
