"""Noise schedule and denoising steps: DDPM (arXiv 2006.11239) and DDIM (arXiv 2010.02502), as in diffusers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.vla.chains import Transition

LARGEST_BETA = 0.999
LEAST_VARIANCE = 1e-20


def betas(config: DiffusionConfig) -> Tensor:
    """Return the noise variance [T] added at each diffusion timestep of training, in float32."""
    count, first, last = config.num_train_timesteps, config.beta_start, config.beta_end
    match config.beta_schedule:
        case "linear":
            return torch.linspace(first, last, count)
        case "scaled_linear":
            return torch.linspace(first**0.5, last**0.5, count) ** 2
        case "sigmoid":
            return torch.sigmoid(torch.linspace(-6, 6, count)) * (last - first) + first
    shares = [_cosine(i / count) for i in range(count + 1)]
    return torch.tensor([min(1 - shares[i + 1] / shares[i], LARGEST_BETA) for i in range(count)], dtype=torch.float32)


def _cosine(t: float) -> float:
    return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of a denoising step."""

    clean: Tensor
    """[B, H, A] clipped estimate of the clean chunk."""
    mean: Tensor
    """[B, H, A] mean of the next state."""
    std: Tensor
    """[B, 1, 1] standard deviation; 0 in the last step."""

    @property
    def certain(self) -> Transition:
        """Deterministic transition to the mean of the next state."""
        return Transition(mean=self.mean, std=torch.zeros_like(self.std))


class Schedule:
    """Denoising steps from noise to a chunk; `levels`: training step of each denoising step, noisiest first."""

    def __init__(self, config: DiffusionConfig, steps: int, sampler: str, eta: float = 0.0) -> None:
        """Build a schedule of `steps` denoising steps: DDPM, or DDIM with `eta` times the noise of DDPM."""
        self._config, self._ddpm, self._eta = config, sampler == "DDPM", eta
        self.shares = torch.cumprod(1.0 - betas(config), 0)
        """[T] fraction of signal variance after each training step."""
        self._stride = config.num_train_timesteps // steps
        self.levels = torch.arange(steps - 1, -1, -1) * self._stride

    def add_noise(self, chunk: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Add `noise` to chunks [B, H, A] with the scale of the diffusion steps `level` [B]."""
        share = self.shares.to(chunk.device)[level][:, None, None]
        return share.sqrt() * chunk + (1 - share).sqrt() * noise

    def step(self, x: Tensor, predicted: Tensor, level: Tensor) -> Step:
        """Compute the next state of the denoising process.

        Args:
            x: [B, H, A] states.
            predicted: [B, H, A] network output: the noise, or the chunk (`prediction_type`).
            level: [B] training steps of the states.
        """
        shares = self.shares.to(x.device)
        before = level - self._stride
        now = shares[level][:, None, None]
        then = torch.where(before >= 0, shares[before.clamp(min=0)], shares.new_ones(()))[:, None, None]
        if self._config.prediction_type == "sample":
            clean = predicted
            noise = (x - now.sqrt() * clean) / (1 - now).sqrt()
        else:
            clean, noise = (x - (1 - now).sqrt() * predicted) / now.sqrt(), predicted
        if self._config.clip_sample:
            bound = self._config.clip_sample_range
            clean = clean.clamp(-bound, bound)
        variance = (1 - then) / (1 - now) * (1 - now / then)
        last = (before < 0)[:, None, None]
        if self._ddpm:
            ratio = now / then
            mean = then.sqrt() * (1 - ratio) / (1 - now) * clean + ratio.sqrt() * (1 - then) / (1 - now) * x
            std = variance.clamp(min=LEAST_VARIANCE).sqrt().masked_fill(last, 0.0)
            return Step(clean=clean, mean=mean, std=std)
        std = self._eta * variance.clamp(min=0.0).sqrt()
        mean = then.sqrt() * clean + (1 - then - std.square()).clamp(min=0.0).sqrt() * noise
        return Step(clean=clean, mean=mean, std=std)
