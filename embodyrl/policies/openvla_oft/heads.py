"""Continuous action heads of the official OFT recipe: L1 regression and diffusion."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.lerobot.diffusion.schedule import Schedule

TRAIN_STEPS = 50
"""Number of diffusion steps in the published training recipe."""
RESIDUAL_BLOCKS = 2


class ResidualBlock(nn.Module):
    """Residual block x + ReLU(Linear(LayerNorm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to [..., D]."""
        return x + self.ffn(x)


class ResidualMlp(nn.Module):
    """MLP that maps the concatenated hidden states of an action's A tokens to the action [A]."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.layer_norm1 = nn.LayerNorm(action_dim * width)
        self.fc1 = nn.Linear(action_dim * width, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(RESIDUAL_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, L, D] of all action tokens to actions [B, K, A]."""
        x = hidden.unflatten(1, (-1, self.action_dim)).flatten(2)
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """L1 regression head; the output is the normalized action."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.model = ResidualMlp(action_dim, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, L, D] to actions [B, K, A] in -1..1."""
        return self.model(hidden)


class ActionScale(nn.Module):
    """Learned log standard deviation [A] of normalized actions, which RL samples around the L1 head's output.

    The parameter is always float32.
    """

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(action_dim))


class DiffusionHead(nn.Module):
    """Diffusion head, which predicts the noise in a noisy action chunk."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.noise_predictor = nn.ModuleDict({"mlp_resnet": ResidualMlp(action_dim, width)})

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, L, D] to the noise in a chunk, [B, K, A]."""
        return self.noise_predictor["mlp_resnet"](hidden)


def embed_time(step: Tensor, width: int) -> Tensor:
    """Return a sinusoidal embedding [B, D] of timesteps t [B]: sin and cos of t * exp(-ln(1e4) * i / (D/2 - 1))."""
    half = width // 2
    # Multiply before dividing, as the published code does: denoising can amplify a difference in the last bit.
    frequency = torch.exp(torch.arange(half, device=step.device) * -math.log(10000.0) / (half - 1))
    angle = step[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def build_ddim_schedule(steps: int, eta: float = 0.0) -> Schedule:
    """Return a schedule of `steps` DDIM steps as in the published recipe: cosine, clean estimates clipped to -1..1.

    With `eta` 0, the steps are deterministic; with 1, they add the same noise as DDPM.
    """
    return Schedule(DiffusionConfig(num_train_timesteps=TRAIN_STEPS), steps, "DDIM", eta)
