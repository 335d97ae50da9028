"""Ensemble of critics Q(features, actions), with one batched matrix product per layer."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Critics(nn.Module):
    """Ensemble of critics, which map features [B, F] and action chunks [B, L] to Q values [count, B]."""

    def __init__(self, count: int, widths: tuple[int, ...], generator: torch.Generator, *, layer_norm: bool) -> None:
        """Initialize `count` critics with the input width F + L and the hidden widths in `widths`.

        Layer normalization before each ReLU is that of arXiv 2302.02948, without a learned scale and shift.
        """
        super().__init__()
        self._normalized = layer_norm
        shapes = [(count, a, b) for a, b in pairwise((*widths, 1))]
        bounds = [a**-0.5 for _, a, _ in shapes]  # like torch.nn.Linear
        uniform = [(torch.rand(s, generator=generator) * 2 - 1) * k for s, k in zip(shapes, bounds, strict=True)]
        self.weights = nn.ParameterList(uniform)
        self.biases = nn.ParameterList(torch.zeros(count, 1, b) for _, _, b in shapes)

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Return the Q values [count, B] of features [B, F] and chunks [B, L]."""
        x = torch.cat([features, actions], 1).expand(len(self.weights[0]), -1, -1)
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if index < last:
                x = functional.layer_norm(x, x.shape[-1:]) if self._normalized else x
                x = functional.relu(x)
        return x[..., 0]
