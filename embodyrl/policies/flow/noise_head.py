"""The learned noise of Flow-Noise."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

HIDDEN = (128, 64)


class _Layer(nn.Module):
    """One layer under the name that RLinf's checkpoints give it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.linear_1(x)


class _Layers(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers = [_Layer(a, b) for a, b in pairwise(widths)]
        nn.init.zeros_(layers[-1].linear_1.weight)
        nn.init.zeros_(layers[-1].linear_1.bias)
        self.moduleList = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]; tanh between the layers."""
        *hidden, last = self.moduleList
        for layer in hidden:
            x = torch.tanh(layer(x))
        return last(x)


class NoiseHead(nn.Module):
    """Deviation of the noise of each number of a chunk, from the expert's hidden rows.

    The log-variance is squashed by tanh into 2 ln(low)..2 ln(high) (ReinFlow, arXiv 2505.22094); widths and names of
    the layers are those of piRL's public code. A new head gives the geometric mean of the range everywhere.
    """

    def __init__(self, width: int, action_width: int, low: float, high: float) -> None:
        super().__init__()
        self.mlp_logvar = _Layers((width, *HIDDEN, action_width))
        self._low, self._high = 2.0 * math.log(low), 2.0 * math.log(high)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H, D] from hidden rows [B, H, width]."""
        share = 0.5 * (torch.tanh(self.mlp_logvar(hidden)) + 1.0)
        return (0.5 * (self._low + (self._high - self._low) * share)).exp()
