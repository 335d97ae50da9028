"""The faster product of linear layers on a CPU: its numbers and gradients are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from embodyrl.policies import linear as module
from embodyrl.policies.linear import Linear, Stack, linear, stacked

faster = pytest.mark.skipif(not module.HAS_PRODUCT, reason="this processor or torch has no faster product")


def values_and_gradients(product, bias, *, transposed=False, sizes=(128, 352)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 90, sizes[0], generator=generator, requires_grad=True)
    weight = torch.randn(*sizes[::-1], generator=generator, requires_grad=True)
    b = torch.randn(sizes[1], generator=generator, requires_grad=True) if bias else None
    out = product(x.transpose(0, 1) if transposed else x, weight, b)
    # Expanded: the gradient of a mean has no memory of its own.
    loss = out.pow(2).mean() if not transposed else out.mean()
    loss.backward()
    return [out, x.grad, weight.grad, *([b.grad] if b is not None else [])]


@faster
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("sizes", [(128, 352), (352, 128)])
def test_values_and_gradients_are_those_of_torch(bias, transposed, sizes):
    found = values_and_gradients(linear, bias, transposed=transposed, sizes=sizes)
    assert "_Linear" in str(found[0].grad_fn)
    assert found[2].is_contiguous()
    expected = values_and_gradients(F.linear, bias, transposed=transposed, sizes=sizes)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))


@faster
def test_acting_and_scoring_come_to_the_same_numbers():
    layer, x = Linear(128, 352), torch.randn(200, 128)
    scored = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), scored, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_and_autocast_take_the_usual_product(dtype):
    x, weight = torch.randn(200, 128, dtype=dtype), torch.randn(352, 128, dtype=dtype, requires_grad=True)
    assert "_Linear" not in str(linear(x, weight, None).grad_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.randn(200, 128), torch.randn(352, 128), None).dtype == torch.bfloat16


@faster
def test_frozen_weights_keep_no_inputs():
    """Beside adapters they would be most of the memory of an update."""
    x, weight = torch.randn(200, 128, requires_grad=True), torch.randn(352, 128)
    out = linear(x, weight, None)
    assert [kept is None for kept in out.grad_fn.saved_tensors] == [True, False]
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(200, -1), rtol=1e-5, atol=1e-4)


SHAPES = {
    "one row without a batch": (torch.ones(5), torch.ones(3, 5), torch.ones(3)),
    "no rows": (torch.ones(2, 0, 5), torch.ones(3, 5), None),
    "no inputs": (torch.ones(4, 0), torch.ones(3, 0), torch.ones(3)),
    "no outputs": (torch.ones(4, 5), torch.ones(0, 5), torch.ones(0)),
    "a bias with gaps": (torch.ones(4, 5), torch.ones(3, 5), torch.arange(6.0)[::2]),
    "one number as bias": (torch.ones(4, 5), torch.ones(3, 5), torch.arange(1.0, 2.0).expand(3)),
    "inputs with gaps": (torch.arange(40.0).view(4, 10)[:, ::2], torch.arange(15.0).view(5, 3).t(), None),
    "one input for all": (torch.arange(5.0).expand(4, 5), torch.arange(5.0).expand(3, 5), torch.arange(3.0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_and_any_place_in_memory_has_the_numbers_of_torch(name):
    """Fails where a bias goes to the product as it lies in memory, or where nothing at all goes there."""
    parts = [None if part is None else part.requires_grad_() for part in SHAPES[name]]
    leaves = [part for part in parts if part is not None]
    results = []
    for product in (linear, F.linear):
        out = product(*parts)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(linear(*parts), results[1][0])


@faster
def test_a_gradient_of_a_gradient_is_refused_and_not_zero():
    x, weight = torch.ones(4, 5, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear(x, weight, None).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def usual(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    first, second, last = stack
    after = {"tanh": torch.tanh, "relu": torch.relu}[stack.activation]
    return last(after(second(after(first(x)))))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_stacks_have_the_numbers_and_gradients_of_their_layers(activation, rows):
    """Fails where an activation, a bias or a gradient is left out or goes to another layer; many rows go elsewhere."""
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


def test_stacks_of_other_types_and_of_nothing_take_the_usual_way():
    stack = Stack({"0": nn.Linear(5, 64), "2": nn.Linear(64, 64), "4": nn.Linear(64, 3)}, "tanh")
    assert stack(torch.zeros(0, 5)).shape == (0, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stack(torch.randn(8, 5)).dtype == torch.bfloat16
    x = torch.randn(8, 5, dtype=torch.float64)
    stack = stack.double()
    torch.testing.assert_close(stack(x), usual(stack, x))
