"""Frozen linear layers with low-rank adapters on a GPU: whatever is added to an output, the matrix product adds.

Plain PyTorch makes the frozen product, the adapter's, and their sum one after the other, each a pass over the output,
and autograd adds up the gradients of an input that several layers read in as many passes. Here the large product runs
last and begins at what is there already (`addmm_`), forwards and backwards, and the first factors of layers that read
one input are one matrix. Layers elsewhere are called as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def linears(layers: Sequence[nn.Module], x: Tensor, onto: Tensor | None = None) -> list[Tensor]:
    """Outputs [..., out] of layers of one input x [..., in]; `onto` [..., out] is added to the only one."""
    half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if not x.is_cuda or not all(hasattr(layer, "lora_A") for layer in layers):
        out = [layer(x) for layer in layers]
        return out if onto is None else [onto + out[0]]
    if onto is not None and onto.dtype != half:
        return [onto + adapted(layers, x.to(half), None)[0]]
    return adapted(layers, x.to(half), onto)


def adapted(layers: Sequence[Any], x: Tensor, onto: Tensor | None) -> list[Tensor]:
    """What `linears` returns of layers with one peft adapter each, in the type of x, on any device."""
    parts: list[Tensor | None] = []
    scales = []
    for layer in layers:
        (name,) = layer.active_adapters
        base, low, high = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
        scales.append(layer.scaling[name])
        parts += [base.weight, base.bias, low.to(x.dtype), high.to(x.dtype)]
    start = None if onto is None else onto.flatten(0, -2)
    rows = _Adapted.apply(x.flatten(0, -2), start, tuple(scales), *parts)
    return [out.unflatten(0, x.shape[:-1]) for out in rows]


class _Adapted(torch.autograd.Function):
    """onto + W x + b + s B A x of several (W [out, in], b [out], A [r, in], B [out, r]); W and b have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, scales: tuple[float, ...], *parts: Tensor) -> Any:
        weights, biases, lows, highs = (list(parts[i::4]) for i in range(4))
        factors = torch.cat(lows) if len(lows) > 1 else lows[0]
        seen = x @ factors.t()
        sizes = [len(low) for low in lows]
        outs = []
        for weight, bias, high, scale, low in zip(weights, biases, highs, scales, seen.split(sizes, 1), strict=True):
            out = _scaled(low, high.t(), scale, bias if onto is None else onto)
            if bias is not None and onto is not None:
                out += bias
            outs.append(out.addmm_(x, weight.t()))
        ctx.save_for_backward(x, seen, factors, *weights, *highs)
        ctx.scales, ctx.sizes, ctx.added = scales, sizes, onto is not None
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, seen, factors, *more = ctx.saved_tensors
        weights, highs = more[: len(grads)], more[len(grads) :]
        down = [_scaled(g, high, s) for g, high, s in zip(grads, highs, ctx.scales, strict=True)]
        below = torch.cat(down, 1) if len(down) > 1 else down[0]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = below @ factors
            for grad, weight in zip(grads, weights, strict=True):
                of_x.addmm_(grad, weight)
        of_lows = (below.t() @ x).split(ctx.sizes)
        of_highs = [
            _scaled(g.t(), low, s) for g, low, s in zip(grads, seen.split(ctx.sizes, 1), ctx.scales, strict=True)
        ]
        of_parts = [part for pair in zip(of_lows, of_highs, strict=True) for part in (None, None, *pair)]
        return of_x, grads[0] if ctx.added else None, None, *of_parts


def _scaled(a: Tensor, b: Tensor, scale: float, onto: Tensor | None = None) -> Tensor:
    """Add scale a b to `onto`; the product takes both in."""
    if onto is None:
        return (a @ b) if scale == 1.0 else torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)
    return torch.addmm(onto, a, b, alpha=scale)
