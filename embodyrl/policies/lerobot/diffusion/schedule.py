"""Noise schedule and denoising steps: DDPM (arXiv 2006.11239) and DDIM (arXiv 2010.02502), as in diffusers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.chains import GaussianChain, Transition, Velocity
from embodyrl.policies.vla.records import ChunkRecord
from embodyrl.policies.vla.sampling import STEP, sample_normals
from embodyrl.types import IntArray

MAX_BETA = 0.999
MIN_VARIANCE = 1e-20


def compute_betas(config: DiffusionConfig) -> Tensor:
    """Return the noise variance [T] added at each diffusion timestep of training, in float32."""
    count, first, last = config.num_train_timesteps, config.beta_start, config.beta_end
    match config.beta_schedule:
        case "linear":
            return torch.linspace(first, last, count)
        case "scaled_linear":
            return torch.linspace(first**0.5, last**0.5, count) ** 2
        case "sigmoid":
            return torch.sigmoid(torch.linspace(-6, 6, count)) * (last - first) + first
    signal_fractions = [_compute_signal_fraction(i / count) for i in range(count + 1)]
    return torch.tensor(
        [min(1 - signal_fractions[i + 1] / signal_fractions[i], MAX_BETA) for i in range(count)], dtype=torch.float32
    )


def _compute_signal_fraction(t: float) -> float:
    return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2


class Schedule:
    """Denoising steps from noise to a chunk; `timesteps` [steps] are their diffusion timesteps, noisiest first."""

    def __init__(self, config: DiffusionConfig, steps: int, sampler: str, eta: float = 0.0) -> None:
        """Build a schedule of `steps` denoising steps: DDPM, or DDIM with `eta` times the noise of DDPM."""
        self._config, self._ddpm, self._eta = config, sampler == "DDPM", eta
        self.alphas_cumprod = torch.cumprod(1.0 - compute_betas(config), 0)
        """[T] fraction of signal variance at each diffusion timestep."""
        self._stride = config.num_train_timesteps // steps
        self.timesteps = torch.arange(steps - 1, -1, -1) * self._stride

    def add_noise(self, chunk: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Add `noise` to chunks [B, H, A] with the noise level of diffusion timesteps `timestep` [B]."""
        alpha_cumprod = to_device(self.alphas_cumprod, chunk.device)[timestep][:, None, None]
        return alpha_cumprod.sqrt() * chunk + (1 - alpha_cumprod).sqrt() * noise

    def step(self, x: Tensor, predicted: Tensor, timestep: Tensor) -> Transition:
        """Return the distribution of the next state; the standard deviation is [B, 1, 1], and 0 in the last step.

        Args:
            x: [B, H, A] states.
            predicted: [B, H, A] network output: the noise, or the chunk (`prediction_type`).
            timestep: [B] diffusion timesteps of the states.
        """
        alphas_cumprod = to_device(self.alphas_cumprod, x.device)
        previous_timestep = timestep - self._stride
        alpha = alphas_cumprod[timestep][:, None, None]
        previous_alpha = torch.where(
            previous_timestep >= 0, alphas_cumprod[previous_timestep.clamp(min=0)], alphas_cumprod.new_ones(())
        )[:, None, None]
        if self._config.prediction_type == "sample":
            clean = predicted
            noise = (x - alpha.sqrt() * clean) / (1 - alpha).sqrt()
        else:
            clean, noise = (x - (1 - alpha).sqrt() * predicted) / alpha.sqrt(), predicted
        if self._config.clip_sample:
            bound = self._config.clip_sample_range
            clean = clean.clamp(-bound, bound)
        variance = (1 - previous_alpha) / (1 - alpha) * (1 - alpha / previous_alpha)
        last = (previous_timestep < 0)[:, None, None]
        if self._ddpm:
            ratio = alpha / previous_alpha
            mean = (
                previous_alpha.sqrt() * (1 - ratio) / (1 - alpha) * clean
                + ratio.sqrt() * (1 - previous_alpha) / (1 - alpha) * x
            )
            std = variance.clamp(min=MIN_VARIANCE).sqrt().masked_fill(last, 0.0)
            return Transition(mean=mean, std=std)
        std = self._eta * variance.clamp(min=0.0).sqrt()
        mean = previous_alpha.sqrt() * clean + (1 - previous_alpha - std.square()).clamp(min=0.0).sqrt() * noise
        return Transition(mean=mean, std=std)

    def denoise(self, predict: Callable[[Tensor, Tensor], Tensor], x: Tensor, seeds: IntArray | None = None) -> Tensor:
        """Denoise the initial noise x [B, H, A] to chunks [B, H, A]. If `seeds` is None, no step adds noise.

        `predict` is the network: a function of states [B, H, A] and diffusion timesteps [B].
        """
        for index, number in enumerate(self.timesteps.tolist()):
            timestep = torch.full((len(x),), number, device=x.device)
            step = self.step(x, predict(x, timestep), timestep)
            x = step.mean
            if seeds is not None and step.std.any():
                x = x + step.std * sample_normals(seeds, STEP + index, x.shape[1:], x.device)
        return x


class DenoisingChain(GaussianChain):
    """Denoising chain as a policy (DPPO, arXiv 2409.00588), with a lower bound on the standard deviations.

    If one step is stochastic, the other steps are DDIM steps without noise.
    """

    def __init__(
        self,
        record: ChunkRecord,
        stochastic_schedule: Schedule,
        deterministic_schedule: Schedule,
        *,
        every_step: bool,
        min_std: float,
        first_executed: int = 0,
    ) -> None:
        """Set up a chain whose stochastic and deterministic steps have separate schedules."""
        steps = len(stochastic_schedule.timesteps)
        super().__init__(record, num_steps=steps, every_step=every_step, sampled_steps=steps)
        self._stochastic_schedule, self._deterministic_schedule = stochastic_schedule, deterministic_schedule
        self._min_std, self._first_executed = min_std, first_executed

    def _step(self, velocity: Velocity, x: Tensor, index: Tensor) -> tuple[Transition, Transition]:
        """Return the stochastic and the deterministic denoising step."""
        timestep = to_device(self._stochastic_schedule.timesteps, x.device)[index]
        predicted, _ = velocity(x, timestep)
        step = self._stochastic_schedule.step(x, predicted, timestep)
        greedy_step = self._deterministic_schedule.step(x, predicted, timestep)
        return Transition(mean=step.mean, std=step.std.clamp(min=self._min_std)), greedy_step

    def _select_executed(self, x: Tensor) -> Tensor:
        """Return the executed actions [B, K, A] of chunks x [B, H, A], without the actions of past steps."""
        return x[:, self._first_executed : self._first_executed + self._shape.executed]
