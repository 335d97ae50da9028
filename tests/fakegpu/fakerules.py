"""Operations that CUDA rejects but fake tensors accept: non-deterministic sums and mixed-device lists of tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

UNORDERED = """
nll_loss2d_forward nll_loss2d_backward put_ histc median kthvalue max_unpool2d max_unpool3d ctc_loss_backward
avg_pool3d_backward adaptive_avg_pool2d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
adaptive_max_pool2d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward grid_sampler_2d_backward
upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward grid_sampler_3d_backward reflection_pad1d_backward
reflection_pad2d_backward reflection_pad3d_backward
"""
"""Operations that raise on CUDA in deterministic mode (documentation of `torch.use_deterministic_algorithms`)."""


def place() -> str:
    """Return the source line of embodyrl that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("embodyrl."):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{frame.f_globals['__name__']}:{frame.f_lineno}"


def refuse_unordered(name: str, ins: Iterable[Tensor], kwargs: dict[str, Any]) -> None:
    if not torch.are_deterministic_algorithms_enabled() or not any(t.device.type == "cuda" for t in ins):
        return
    first = next(iter(ins))
    adds_floats = name in ("cumsum", "cumsum_") and (kwargs.get("dtype") or first.dtype).is_floating_point
    weighted = name == "bincount" and len(list(ins)) > 1
    if name in UNORDERED.split() or adds_floats or weighted:
        raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA, at {place()}")


def refuse_mixed(name: str, args: list[Any]) -> None:
    """Raise an error for lists of tensors on several devices; fake tensors check only plain arguments."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    together = [[t for one in lists for t in one]]
    if name.startswith("_foreach_") and len({len(one) for one in lists}) == 1:
        together = [[t for t in row if t.dim() or t.device.type == "cuda"] for row in zip(*lists, strict=True)]
    elif not name.startswith("_fused_"):
        return
    for row in together:
        if len(devices := {t.device for t in row}) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"Expected all tensors to be on the same device, found {found} in lists of {name}")
