"""Matrix products of a network's layers on a CPU.

torch takes MKL for them, which runs AVX2 code on processors that are not Intel's. oneDNN, which torch brings along for
convolutions, has AVX-512 kernels for all: 2.2 times as fast on a Zen 5 (2000 x 128 times 128 x 352), with the same bits
forwards wherever it was compared. torch has no autograd formula for that product, so it stands here.
"""

from collections.abc import Callable
from typing import Any

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


def _is_quick(x: Tensor, weight: Tensor) -> bool:
    quick = HAS_PRODUCT and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    # Of nothing it refuses.
    quick = quick and x.dim() > 1 and x.numel() > 0 and weight.numel() > 0
    return quick and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `torch.nn.functional.linear` gives, up to rounding: x [..., in], weight [out, in], bias [out]."""
    # Whatever the size: a row's numbers should not depend on how many there are.
    if not _is_quick(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, "none") if torch.is_grad_enabled() else _product(x, weight, bias)


class _Linear(torch.autograd.Function):
    """f(x W^T + b)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        ctx.activation = activation
        out = _product(x, weight, bias, activation)
        # Of frozen weights beside adapters only what is needed: inputs are as large as all that is computed.
        kept = x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(*kept, *([] if activation == "none" else [out]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, *out = ctx.saved_tensors
        grad = grads[0].contiguous()
        if out:
            grad = _ACTIVATIONS[ctx.activation][1](grad, out[0])
        rows = grad.flatten(0, -2)
        of_x = None if weight is None else _product(grad, weight.t(), None)
        of_weight = None if x is None else _product(rows.t(), x.flatten(0, -2).t(), None)
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class Linear(nn.Linear):
    """A linear layer that takes the faster product."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return linear(input, self.weight, self.bias)


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "none": (lambda out: out, lambda grad, out: grad),
    "tanh": (torch.tanh, torch.ops.aten.tanh_backward),
    "relu": (torch.relu, lambda grad, out: torch.ops.aten.threshold_backward(grad, out, 0.0)),
}
"""By name: the function, and the gradient of its input from that of its output and the output."""

_MANY = 2**15
"""Outputs of a small network's layer from which on the faster product gains more than its calls cost."""


class Dense(nn.Linear):
    """A layer of a small network with its activation, one operation where there are many rows: tanh alone would take
    longer than the product.
    """

    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        """`activation`: none, tanh or relu."""
        super().__init__(inputs, outputs)
        self.activation = activation
        # Looked up once: of few rows every operation counts.
        self._after, self._many = _ACTIVATIONS[activation][0], _MANY // outputs

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in] to [B, out]."""
        if len(input) < self._many or not _is_quick(input, self.weight):
            return self._after(F.linear(input, self.weight, self.bias))
        if not torch.is_grad_enabled():
            return _product(input, self.weight, self.bias, self.activation)
        return _Linear.apply(input, self.weight, self.bias, self.activation)
