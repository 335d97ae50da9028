"""Optimizer steps for any memory layout of a gradient."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from itertools import cycle

import pytest
import torch

from embodyrl.learners.adam import build_adam
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import Optimization


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_gradient_with_different_strides_is_applied_correctly(order: str) -> None:
    """Adam's first step has the size of the rate and the sign of the gradient; torch's fused CPU step is wrong here."""
    layer = torch.nn.Linear(7, 5, bias=False)
    before = layer.weight.detach().clone()
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    layer.weight.grad = gradient if order == "rows" else gradient.t().contiguous().t()
    rate = 0.01
    optim = OptimSettings(lr=rate, schedule="constant", weight_decay=0.0, warmup_steps=0, clip_grad=1e6)
    Optimization(layer, optim, 10).step(0.0)
    assert torch.allclose(layer.weight.detach() - before, -rate * gradient.sign(), atol=1e-5)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_optimizer_steps_and_states_match_torch(order: str) -> None:
    """Two groups, missing gradients, a changed rate and a checkpoint of torch's own AdamW."""

    def build() -> list[torch.nn.Parameter]:
        random = torch.Generator().manual_seed(0)
        return [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in ((7, 5), (5,), (3, 5), ())]

    theirs, ours = build(), build()
    settings = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-5, "betas": (0.8, 0.9)}
    reference, adam = (
        make([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.02}], **settings)
        for make, weights in ((torch.optim.AdamW, theirs), (build_adam, ours))
    )
    random = torch.Generator().manual_seed(1)
    missing = cycle([(), (), (0, 1), (1,), (), (0, 1, 2, 3)])
    for step, absent in zip(range(14), missing, strict=False):
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=random)
            if order == "columns" and gradient.dim() == 2:
                gradient = gradient.t().contiguous().t()
            for weight in pair:
                weight.grad = None if index in absent else gradient.clone()
        reference.step()
        adam.step()
        if step == 8:
            adam.load_state_dict(deepcopy(reference.state_dict()))
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    first, second = reference.state_dict()["state"], adam.state_dict()["state"]
    assert list(first) == list(second)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_other_optimizers_are_not_patched() -> None:
    before = {name: vars(torch.optim.Optimizer)[name] for name in ("add_param_group", "zero_grad", "state_dict")}
    build_adam([{"params": [torch.nn.Parameter(torch.ones(2))]}], lr=0.1)
    assert before == {name: vars(torch.optim.Optimizer)[name] for name in before}


@pytest.mark.integration
def test_building_adam_does_not_import_the_compiler():
    """Importing the compiler takes longer than the rest of a small run's startup."""
    code = (
        "import sys, torch; from embodyrl.learners.adam import build_adam; layer = torch.nn.Linear(2, 2); "
        "adam = build_adam([{'params': list(layer.parameters())}], lr=1e-3); layer(torch.ones(1, 2)).sum().backward(); "
        "adam.step(); adam.zero_grad(); adam.load_state_dict(adam.state_dict()); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False"]
