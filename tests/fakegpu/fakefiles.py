"""Weight files for tensors without data: written as zeros, read unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors.torch
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_real_save_file, _real_load_file = safetensors.torch.save_file, safetensors.torch.load_file


def _save_file(tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Write zeros in place of tensors without data."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"You are trying to save a non contiguous tensor: `{name}` which is not allowed")
    with _disable_current_modes():
        real = {
            n: torch.zeros(tuple(t.shape), dtype=t.dtype) if isinstance(t, FakeTensor) else t
            for n, t in tensors.items()
        }
        _real_save_file(real, filename, metadata)


def _save_state_dict(state: dict[str, Tensor], folder: Any, **more: Any) -> None:
    _save_file({name: tensor.contiguous() for name, tensor in state.items()}, Path(folder) / "model.safetensors")


def _load_file(filename: Any, device: str = "cpu") -> dict[str, Tensor]:
    assert device == "cpu", "files are read into host memory"
    with _disable_current_modes():
        return _real_load_file(filename)


safetensors.torch.save_file, safetensors.torch.load_file = _save_file, _load_file
huggingface_hub.save_torch_state_dict = _save_state_dict
