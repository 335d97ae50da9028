"""The optimizer's step, whatever order a gradient has in memory."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from itertools import cycle

import pytest
import torch

from embodyrl.learners.flat_adam import FlatAdamW
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import Optimization


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


ORDERS = {
    "columns": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:1].expand_as(g),
    "every second": lambda g: g.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("order", ORDERS)
def test_weights_as_one_vector_move_as_those_of_torchs_own_step(order: str) -> None:
    """To the last bit, whatever order gradients and weights have, with gradients missing and over a checkpoint."""

    def build() -> list[torch.nn.Parameter]:
        random = torch.Generator().manual_seed(0)
        shapes = ((7, 5), (5,), (3, 5), ())
        weights = [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]
        weights[2].data = weights[2].data.t().contiguous().t()
        return weights

    sides = build(), build()
    settings = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-5, "betas": (0.8, 0.9)}
    optimizers = [
        kind([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.02}], **settings)
        for kind, weights in zip((torch.optim.AdamW, FlatAdamW), sides, strict=True)
    ]
    random = torch.Generator().manual_seed(1)
    missing = cycle([(), (), (0, 1), (1,), (), (0, 1, 2, 3)])
    for step, absent in zip(range(14), missing, strict=False):
        for index, pair in enumerate(zip(*sides, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=random)
            if gradient.dim() == 2:
                gradient = ORDERS[order](gradient)
            for weight in pair:
                weight.grad = None if index in absent else gradient
        for optimizer in optimizers:
            optimizer.step()
        if step == 5:  # whoever loads weights may bring new memory
            for weight in sides[1]:
                weight.data = weight.data.clone()
        if step == 8:
            optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
        for theirs, ours in zip(*sides, strict=True):
            assert torch.equal(theirs, ours), (step, theirs - ours)
    first, second = (optimizer.state_dict() for optimizer in optimizers)
    for index, state in first["state"].items():
        assert all(torch.equal(value, second["state"][index][name]) for name, value in state.items())


def test_a_checkpoint_has_the_order_of_the_weights_also_where_one_group_is_a_vector() -> None:
    """As those of several ranks, which have no vectors; the group with a weight that never learns has none either."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = FlatAdamW([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)
    weights[0].grad = weights[2].grad = torch.ones(2)
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [0, 2]


def test_small_networks_start_without_torchs_compiler():
    """Its import takes longer than all else that a small run waits for."""
    code = (
        "import sys, torch; from embodyrl.learners.flat_adam import build_adam; layer = torch.nn.Linear(2, 2); "
        "adam = build_adam([{'params': list(layer.parameters())}], lr=1e-3); layer(torch.ones(1, 2)).sum().backward(); "
        "adam.step(); adam.zero_grad(); adam.load_state_dict(adam.state_dict()); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False"]
