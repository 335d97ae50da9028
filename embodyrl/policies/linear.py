"""Matrix products of a network's layers on a CPU.

torch takes MKL for them, which runs AVX2 code on processors that are not Intel's. oneDNN, which torch brings along for
convolutions, has AVX-512 kernels for all: 2.2 times as fast on a Zen 5 (2000 x 128 times 128 x 352), with the same bits
forwards wherever it was compared. torch has no autograd formula for that product, so it stands here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # It reads a bias by its place in memory: wrong numbers, without a word, where that has gaps.
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _has_product() -> bool:
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"


HAS_PRODUCT = _has_product()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `torch.nn.functional.linear` gives, up to rounding: x [..., in], weight [out, in], bias [out]."""
    quick = HAS_PRODUCT and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    # Whatever the size, but of nothing, which it refuses: a row's numbers should not depend on how many there are.
    quick = quick and x.dim() > 1 and x.numel() > 0 and weight.numel() > 0
    if not quick or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
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
        of_weight = None if x is None else _product(rows.t(), x.flatten(0, -2).t(), None)
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class Linear(nn.Linear):
    """A linear layer that takes the faster product."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return linear(input, self.weight, self.bias)
