"""Small networks as one autograd operation on a CPU, because call overhead exceeds the arithmetic."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Stack(nn.Sequential):
    """Linear layers of a small network with an activation between them."""

    def __init__(self, layers: dict[str, nn.Module], activation: str) -> None:
        """Build the network from linear layers by name and an activation, tanh or relu."""
        super().__init__(OrderedDict(layers))
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in] to [B, out]."""
        return stacked(input, self)[0]


def stacked(x: Tensor, *stacks: Stack) -> Sequence[Tensor]:
    """Return the outputs [B, out] of stacks of one depth and activation for x [B, in]."""
    weights = [weight for stack in stacks for weight in stack.parameters()]
    activation, depth = stacks[0].activation, len(stacks[0])
    plain = x.device.type == "cpu" and x.dtype == weights[0].dtype == torch.float32
    if plain and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling():
        return _Stacks.apply(x, activation, depth, *weights)
    return [_layers(x, activation, weights[at : at + 2 * depth]) for at in range(0, len(weights), 2 * depth)]


def _layers(x: Tensor, activation: str, weights: Sequence[Tensor]) -> Tensor:
    for at in range(0, len(weights) - 2, 2):
        x = F.linear(x, weights[at], weights[at + 1])
        x = x.tanh() if activation == "tanh" else x.relu()
    return F.linear(x, weights[-2], weights[-1])


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return x.relu_()
    np.tanh(values := x.numpy(), out=values)  # several times as fast as torch's
    return x


class _Stacks(torch.autograd.Function):
    """Several `Stack`s of one depth on one input; `weights`: weight and bias of each layer of each stack."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, depth: int, *weights: Tensor) -> tuple[Tensor, ...]:
        inputs, outputs = [], []
        for start in range(0, len(weights), 2 * depth):
            here = x
            for at in range(start, start + 2 * depth, 2):
                inputs.append(here)
                here = F.linear(here, weights[at], weights[at + 1])
                if at < start + 2 * depth - 2:
                    here = _activate(here, activation)
            outputs.append(here)
        ctx.activation, ctx.depth = activation, depth
        ctx.save_for_backward(*inputs, *weights[::2])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept, depth = ctx.saved_tensors, ctx.depth
        inputs, weights = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        to_x = ctx.needs_input_grad[0]
        of_x, of_weights = None, []
        for grad, end in zip(reversed(grads), range(len(inputs), 0, -depth), strict=True):
            for at in range(end - 1, end - depth - 1, -1):
                of_weights += [grad.sum(0), grad.t() @ inputs[at]]
                if at > end - depth:
                    grad, y = grad @ weights[at], inputs[at]
                    grad = grad.mul_(y > 0) if ctx.activation == "relu" else grad.addcmul_(grad * y, y, value=-1)
            if to_x:
                part = grad @ weights[end - depth]
                of_x = part if of_x is None else of_x + part
        return of_x, None, None, *of_weights[::-1]
