"""Continuous action heads of the official OFT recipe: L1 regression and diffusion."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRAIN_STEPS = 50
"""Number of diffusion steps in the published training recipe."""
RESIDUAL_BLOCKS = 2


class ResidualBlock(nn.Module):
    """Residual block x + ReLU(Linear(LayerNorm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to the same shape."""
        return x + self.ffn(x)


class ResidualMlp(nn.Module):
    """MLP from the concatenated hidden states of an action's A tokens to the action [A]."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.layer_norm1 = nn.LayerNorm(action_dim * width)
        self.fc1 = nn.Linear(action_dim * width, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(RESIDUAL_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, L, D] to [B, K, A]."""
        x = hidden.unflatten(1, (-1, self.action_dim)).flatten(2)
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """L1 regression head; the output is the normalised action."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.model = ResidualMlp(action_dim, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, L, D] to actions [B, K, A] in -1..1."""
        return self.model(hidden)


class ActionScale(nn.Module):
    """Learned log standard deviation [A] of normalised actions, for RL around the L1 head.

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


def time_embedding(step: Tensor, width: int) -> Tensor:
    """Return a sinusoidal embedding [B, D] of diffusion steps [B]: sin and cos of t * exp(-ln(1e4) * i / (D/2 - 1))."""
    half = width // 2
    # Multiply before dividing, as the published code does: denoising can amplify a difference in the last bit.
    frequency = torch.exp(torch.arange(half, device=step.device) * -math.log(10000.0) / (half - 1))
    angle = step[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def cumulative_alphas() -> Tensor:
    """Return the fraction of signal left at each diffusion timestep [50]: squared cosine schedule, betas <= 0.999."""

    def share(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - share((i + 1) / TRAIN_STEPS) / share(i / TRAIN_STEPS), 0.999) for i in range(TRAIN_STEPS)]
    return torch.cumprod(1.0 - torch.tensor(betas, dtype=torch.float32), dim=0)


def ddim_steps(count: int) -> list[int]:
    """Return the training steps of `count` denoising steps, noisiest first ("leading" spacing)."""
    return [i * (TRAIN_STEPS // count) for i in reversed(range(count))]


def ddim_step(x: Tensor, noise: Tensor, step: Tensor, count: int, alphas: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Apply a DDIM step (arXiv 2010.02502, eq. 12 and 16): clip the clean estimate to -1..1, then reduce the noise.

    The noise is not recomputed from the clipped estimate, and the last level is noise-free, as in the published code.

    Args:
        x: [B, K, A] noisy chunks.
        noise: [B, K, A] predicted noise.
        step: [B] training steps of the chunks.
        count: number of steps from noise to actions.
        alphas: [50] fraction of signal after each training step.
        eta: 0: deterministic; 1: as much noise as the forward process has (DDPM).

    Returns:
        Mean [B, K, A] and standard deviation [B, 1, 1].
    """
    previous = step - TRAIN_STEPS // count
    then = torch.where(previous >= 0, alphas[previous.clamp(min=0)], alphas.new_ones(()))
    now, then = alphas[step][:, None, None], then[:, None, None]
    clean = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1.0, 1.0)
    variance = eta**2 * (1 - then) / (1 - now) * (1 - now / then)
    return then.sqrt() * clean + (1 - then - variance).sqrt() * noise, variance.sqrt()
