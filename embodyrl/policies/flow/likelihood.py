"""Log-probabilities of the action chunks of a flow: from SDE steps, from learned noise, or estimated by FPO.

x is the state at t, v = v(x, t) the velocity with the target noise - data, d the length of a step. The clean estimate
is x - t v, the noise estimate x + (1 - t) v; t = 1 is noise, t = 0 is data. Flow policy optimization computes ratios
from differences of the flow-matching loss (arXiv 2507.21053).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.flow.settings import FlowSettings, JointLogprob, Likelihood, get_chunk_record
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.chains import GaussianChain, Transition, Velocity
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.policies.vla.sampling import PAIRS, START, TIMES, SampledChunks, sample_normals, sample_uniforms
from embodyrl.types import IntArray

NoiseStd = Callable[[Tensor], Tensor]
"""Function from the expert's hidden states [B, H, width] to standard deviations [B, H, D]."""


def get_step_times(index: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the start time 1 - index/steps and the end time of Euler steps `index` [B], both float32 [B, 1, 1]."""
    begin, end = (1.0 - i.float() / steps for i in (index, index + 1))
    return begin[:, None, None], end[:, None, None]


def ode(x: Tensor, v: Tensor, t: Tensor, end: Tensor) -> Transition:
    """Return the deterministic Euler step x - d v of the flow's ODE (arXiv 2210.02747).

    Args:
        x: [B, H, D] state at `t`.
        v: [B, H, D] velocity there.
        t: start time of the step, broadcasts to `x`.
        end: end time of the step.
    """
    return Transition(mean=x - v * (t - end), std=torch.zeros_like(t))


def flow_sde(x: Tensor, v: Tensor, t: Tensor, end: Tensor, level: Tensor) -> Transition:
    """Return an Euler-Maruyama step of the SDE with the flow's marginals (Flow-GRPO, arXiv 2505.05470).

    The mean is x - d (v + s^2 / (2 t) (x + (1 - t) v)) and the standard deviation s sqrt(d), with s = a sqrt(t /
    (1 - t)). In the denominator of s, the first step uses the time of the second step. `level` is a and broadcasts to
    `x`; the other arguments are as in `ode`.
    """
    d = t - end
    # At t = 1 the deviation would be infinite: the first step uses its end time.
    variance = level.square() * t / (1.0 - torch.where(t >= 1.0, end, t))
    # Estimates of data and noise; every step is a mix of both.
    clean, noise = x - v * t, x + v * (1.0 - t)
    mean = clean * (1.0 - end) + noise * (end - variance * d / (2.0 * t))
    return Transition(mean=mean, std=(variance * d).sqrt())


def flow_cps(x: Tensor, v: Tensor, t: Tensor, end: Tensor, level: Tensor) -> Transition:
    """Return a step that preserves the noise level: coefficients-preserving sampling (arXiv 2509.05952).

    The mean is clean (1 - end) + noise end cos(a pi / 2) and the standard deviation end sin(a pi / 2), so the last step
    is deterministic. The arguments are as in `flow_sde`.
    """
    angle = level * (math.pi / 2)
    mean = (x - v * t) * (1.0 - end) + (x + v * (1.0 - t)) * end * angle.cos()
    return Transition(mean=mean, std=end * angle.sin())


def flow_noise(x: Tensor, v: Tensor, t: Tensor, end: Tensor, std: Tensor) -> Transition:
    """Return an Euler step with noise of a learned standard deviation `std` [B, H, D] (ReinFlow, arXiv 2505.22094)."""
    return Transition(mean=x - v * (t - end), std=std)


def integrate_ode(velocity: Velocity, x: Tensor, steps: int) -> Tensor:
    """Integrate the flow from noise x [B, H, D] to a chunk [B, H, D] in `steps` Euler steps."""
    for k in range(steps):
        t, end = get_step_times(torch.full((len(x),), k, device=x.device), steps)
        x = ode(x, velocity(x, t.flatten())[0], t, end).mean
    return x


class ChainLikelihood(GaussianChain):
    """Likelihood of a chain of flow steps; `joint_logprob=mean` averages over all steps and the initial noise."""

    def __init__(self, cfg: FlowSettings, shape: ChunkShape, noise_std: NoiseStd | None) -> None:
        mean = cfg.every_step and cfg.joint_logprob is JointLogprob.mean
        super().__init__(
            get_chunk_record(cfg, shape),
            num_steps=cfg.num_steps,
            every_step=cfg.every_step,
            sampled_steps=cfg.sampled_steps,
            terms=cfg.num_steps + 1 if mean else 1,
        )
        self._cfg, self._noise_std = cfg, noise_std

    def _step(self, velocity: Velocity, x: Tensor, index: Tensor) -> tuple[Transition, Transition]:
        """Return the stochastic step of this likelihood, and the deterministic ODE step."""
        t, end = get_step_times(index, self._cfg.num_steps)
        v, hidden = velocity(x, t.flatten())
        if self._noise_std is not None:
            step = flow_noise(x, v, t, end, self._noise_std(hidden))
        else:
            level = x.new_full((), self._cfg.noise_level)
            step = (flow_cps if self._cfg.likelihood is Likelihood.flow_cps else flow_sde)(x, v, t, end, level)
        return step, ode(x, v, t, end)


class FpoLikelihood:
    """Likelihood of chunks sampled with the ODE, estimated by FPO; has the methods of `GaussianChain`.

    The "log-probability" of an executed action is minus its flow-matching loss (mean over its dimensions) at N pairs
    of noise and time in (0, 1), averaged over the pairs. Tokens contain the chunk and the seed of the pairs. A
    difference of two values estimates a log-ratio. Single values are not densities; the entropy is 0.
    """

    def __init__(self, cfg: FlowSettings, shape: ChunkShape) -> None:
        self._cfg, self._shape = cfg, shape
        self.record = get_chunk_record(cfg, shape)

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> SampledChunks:
        """Integrate the ODE from sampled noise (see `GaussianChain.sample`)."""
        size = (self._shape.horizon, self._shape.width)
        x = integrate_ode(velocity, sample_normals(seeds, START, size, device) * temperature, self._cfg.num_steps)
        tokens = self.record.layout.pack(seeds[:, None], x.flatten(1).cpu().numpy())
        return SampledChunks(state=x, tokens=tokens, logprob=self._compute_negative_loss(velocity, x, seeds))

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return negative flow-matching losses as log-probabilities (see `GaussianChain.score`); entropies are 0."""
        integers, floats = self.record.layout.unpack(tokens)
        x = to_device(floats, device).unflatten(1, (self._shape.horizon, self._shape.width))
        logprob = self._compute_negative_loss(velocity, x, integers[:, 0])
        return logprob, torch.zeros_like(logprob)

    def _compute_negative_loss(self, velocity: Velocity, x: Tensor, seeds: IntArray) -> Tensor:
        """Return negative flow-matching losses [B, K, 1] of chunks [B, H, D], averaged over the pairs."""
        shape, count = self._shape, self._cfg.fpo_pairs
        noise = sample_normals(seeds, PAIRS, (count, shape.horizon, shape.width), x.device)
        t = to_device(sample_uniforms(seeds, TIMES, count).astype(np.float32), x.device)
        losses = [
            flow_matching_error(velocity, x, noise[:, i], t[:, i])[:, : shape.executed, : shape.action_dim].mean(2)
            for i in range(count)
        ]
        return -torch.stack(losses, 2).mean(2, keepdim=True)


def flow_matching_error(velocity: Velocity, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return the squared error [B, H, D] of the velocity between chunks x and noise, both [B, H, D], at t [B].

    The state is t noise + (1 - t) x, the target noise - x (arXiv 2210.02747, with pi0's direction of time).
    """
    time = t[:, None, None]
    v, _ = velocity(time * noise + (1.0 - time) * x, t)
    return (v - (noise - x)).square()
