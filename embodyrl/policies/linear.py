"""Matrix products of a network's layers on a CPU.

torch takes MKL for them, which runs AVX2 code on processors that are not Intel's. oneDNN, which torch brings along for
convolutions, has AVX-512 kernels for all: 2.2 times as fast on a Zen 5 (2000 x 128 times 128 x 352), with the same bits
forwards wherever it was compared. torch has no autograd formula for that product, so it stands here.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    # It reads a bias by its place in memory: wrong numbers, without a word, where that has gaps.
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")


def _has_product() -> bool:
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"


HAS_PRODUCT = _has_product()


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return plain and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def _is_quick(x: Tensor, weight: Tensor) -> bool:
    # Of nothing it refuses.
    return HAS_PRODUCT and _is_plain(x, weight) and x.dim() > 1 and x.numel() > 0 and weight.numel() > 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `torch.nn.functional.linear` gives, up to rounding: x [..., in], weight [out, in], bias [out]."""
    # Whatever the size: a row's numbers should not depend on how many there are.
    if not _is_quick(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if torch.is_grad_enabled() else _product(x, weight, bias)


class _Linear(torch.autograd.Function):
    """x W^T + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Of frozen weights beside adapters only what is needed: inputs are as large as all that is computed.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        rows = grad.flatten(0, -2)
        of_x = None if weight is None else _product(grad, weight.t(), None)
        of_weight = None if x is None else _outer(rows, x.flatten(0, -2))
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _outer(rows: Tensor, x: Tensor) -> Tensor:
    """Sum of the outer products [out, in] of rows [N, out] and [N, in]."""
    # The first factor is copied, for its rows to lie together in memory: the narrower one.
    if x.shape[1] < rows.shape[1]:
        return _product(x.t(), rows.t(), None).t().contiguous()
    return _product(rows.t(), x.t(), None)


class Linear(nn.Linear):
    """A linear layer that takes the faster product."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return linear(input, self.weight, self.bias)


def _tanh(x: Tensor) -> Tensor:
    # In place, by numpy: torch's takes nine times as long.
    np.tanh(values := x.numpy(), out=values)
    return x


_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "tanh": (torch.tanh, _tanh, torch.ops.aten.tanh_backward),
    "relu": (torch.relu, torch.relu_, partial(torch.ops.aten.threshold_backward, threshold=0.0)),
}
"""By name: the function; the same in place on a CPU, without autograd; the gradient of its input from that of its
output and the output."""

_MANY = 2**15
"""Outputs of a small network's layer from which on the faster product gains more than its calls cost."""


def _are_many(x: Tensor, weight: Tensor) -> bool:
    # One operation of many rows: torch's tanh alone would take longer than the product.
    return HAS_PRODUCT and x.shape[0] * weight.shape[0] >= _MANY


def _climb(x: Tensor, activation: str, depth: int, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of all layers, and what comes out of each stack; without autograd."""
    inputs, outputs, at, many = [], [], 0, _are_many(x, weights[0])
    after = _ACTIVATIONS[activation][1]
    while at < len(weights):
        here = x
        for left in reversed(range(depth)):
            inputs.append(here)
            if many:
                here = _product(here, weights[at], weights[at + 1], activation if left else "none")
            else:
                here = F.linear(here, weights[at], weights[at + 1])
                here = after(here) if left else here
            at += 2
        outputs.append(here)
    return inputs, outputs


def _times(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b.t(), None)


def _descend(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    activation: str,
    depth: int,
    grads: Sequence[Tensor],
    *,
    to_x: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients of x, if asked for, and of weight and bias of each layer, from those of what comes out of each stack.

    Args:
        inputs: what `_climb` returned.
        weights: of each layer, without biases.
        activation: between the layers.
        depth: layers of a stack.
        grads: [B, out] of each stack.
        to_x: whether the first is wanted.
    """
    gradient = _ACTIVATIONS[activation][2]
    times = _times if _are_many(inputs[0], weights[0]) else torch.mm
    of_weights: list[Tensor] = []
    of_x = None
    for end in range(len(inputs), 0, -depth):
        grad = grads[end // depth - 1]
        for at in range(end - 1, end - depth - 1, -1):
            of_weights += [grad.sum(0), times(grad.t(), inputs[at])]
            if at > end - depth:
                grad = gradient(times(grad, weights[at]), inputs[at])
        if to_x:
            part = times(grad, weights[end - depth])
            of_x = part if of_x is None else of_x + part
    return of_x, of_weights[::-1]


class _Stacks(torch.autograd.Function):
    """Several `Stack`s of one depth on the same input; `weights`: weight and bias of each layer of each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, depth: int, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.activation, ctx.depth = activation, depth
        inputs, outputs = _climb(x, activation, depth, weights)
        ctx.save_for_backward(*inputs, *weights[::2])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept = ctx.saved_tensors
        half, to_x = len(kept) // 2, ctx.needs_input_grad[0]
        of_x, of_weights = _descend(kept[:half], kept[half:], ctx.activation, ctx.depth, grads, to_x=to_x)
        return of_x, None, None, *of_weights


class Stack(nn.Sequential):
    """Linear layers of a small network with an activation between them."""

    def __init__(self, layers: dict[str, nn.Module], activation: str) -> None:
        """`layers`: linear ones by name; `activation`: tanh or relu."""
        super().__init__(OrderedDict(layers))
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in] to [B, out]."""
        return stacked(input, self)[0]


def _weights(stacks: Sequence[Stack]) -> list[nn.Parameter]:
    """Weight and bias of each layer of each stack."""
    # Not by their names, which modules look up in three places.
    layers = [layer._parameters for stack in stacks for layer in stack._modules.values() if layer is not None]
    return [weight for layer in layers for weight in layer.values() if weight is not None]


def stacked(x: Tensor, *stacks: Stack) -> Sequence[Tensor]:
    """What stacks of one depth and activation make of x [B, in]: [B, out] of each.

    On a CPU it is one operation for autograd: of so small layers calls cost more than what they compute.
    """
    weights, activation, depth = _weights(stacks), stacks[0].activation, len(stacks[0]._modules)
    if not len(x) or not _is_plain(x, weights[0]):
        return [_usual(x, activation, weights[at : at + 2 * depth]) for at in range(0, len(weights), 2 * depth)]
    if torch.is_grad_enabled():
        return _Stacks.apply(x, activation, depth, *weights)
    return _climb(x, activation, depth, weights)[1]


Pull = Callable[..., Tensor | None]
"""Gradients of results, which are added to those of the weights; returns that of the input if it has one. Once."""


@torch.no_grad()
def pulled(x: Tensor, *stacks: Stack) -> tuple[Sequence[Tensor], Pull]:
    """As `stacked`, on a CPU and apart from autograd, whose own work takes longer; with the way back."""
    weights, activation, depth, to_x = _weights(stacks), stacks[0].activation, len(stacks[0]._modules), x.requires_grad
    inputs, outputs = _climb(x, activation, depth, weights)

    @torch.no_grad()
    def pull(*grads: Tensor) -> Tensor | None:
        of_x, of_weights = _descend(inputs, weights[::2], activation, depth, grads, to_x=to_x)
        inputs.clear()  # as autograd lets go of them: the next micro-batch needs the memory
        for weight, gradient in zip(weights, of_weights, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        return of_x

    return outputs, pull


def _usual(x: Tensor, activation: str, weights: Sequence[Tensor]) -> Tensor:
    for at in range(0, len(weights) - 2, 2):
        x = _ACTIVATIONS[activation][0](F.linear(x, weights[at], weights[at + 1]))
    return F.linear(x, weights[-2], weights[-1])
