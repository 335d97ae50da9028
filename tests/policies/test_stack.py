"""Stacked small layers in one operation match separate layers in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embodyrl.policies.actor_critic.networks import Stack, stacked


def usual(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    first, second, last = stack
    after = {"tanh": torch.tanh, "relu": torch.relu}[stack.activation]
    return last(after(second(after(first(x)))))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_stacked_networks_match_separate_layers(activation, rows):
    """Fails if an activation, a bias or a gradient is missing or assigned to another layer."""
    torch.manual_seed(2)
    stacks = [
        Stack({n: nn.Linear(a, b) for n, a, b in (("0", 5, 64), ("2", 64, 64), ("4", 64, out))}, activation)
        for out in (3, 1)
    ]
    x, weights = torch.randn(rows, 5), [torch.randn(rows, 3), torch.randn(rows, 1)]
    found = []
    for function in (stacked, lambda x, *stacks: [usual(stack, x) for stack in stacks]):
        given = x.clone().requires_grad_()
        outs = function(given, *stacks)
        leaves = [given, *(p for stack in stacks for p in stack.parameters())]
        loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
        found.append([*outs, *torch.autograd.grad(loss, leaves)])
    assert "_Stacks" in str(found[0][0].grad_fn)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6 * float(theirs.detach().abs().max()))
    with torch.no_grad():  # acting and scoring come to the same numbers, together or alone
        torch.testing.assert_close(stacks[1](x), found[0][1], rtol=0, atol=0)


def test_stacked_networks_accept_other_dtypes_and_empty_batches():
    stack = Stack({"0": nn.Linear(5, 64), "2": nn.Linear(64, 64), "4": nn.Linear(64, 3)}, "tanh")
    assert stack(torch.zeros(0, 5)).shape == (0, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stack(torch.randn(8, 5)).dtype == torch.bfloat16
    x = torch.randn(8, 5, dtype=torch.float64)
    stack = stack.double()
    torch.testing.assert_close(stack(x), usual(stack, x))
