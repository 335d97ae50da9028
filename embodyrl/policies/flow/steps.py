"""One step of a flow from noise (t = 1) to data (t = 0), as a Gaussian: mean, deviation, log-probability, entropy.

x is the state at t, v = v(x, t) the velocity with the target noise - data, d the length of a step. The clean estimate
is x - t v, the noise estimate x + (1 - t) v.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The state after a step is mean + std * e with standard normal e; where std is 0 the step is certain."""

    mean: Tensor
    """[B, H, D]"""
    std: Tensor
    """Broadcasts to `mean`."""

    def log_prob(self, after: Tensor) -> Tensor:
        """Log-density of each number of `after` [B, H, D]; 0 where the step is certain."""
        certain = self.std == 0
        std = self.std.masked_fill(certain, 1.0)
        density = -0.5 * ((after - self.mean) / std).square() - std.log() - HALF_LOG_TWO_PI
        return density.masked_fill(certain, 0.0)

    def entropy(self) -> Tensor:
        """Differential entropy 0.5 ln(2 pi e std^2) of each number [B, H, D]; 0 where the step is certain."""
        certain = self.std == 0
        entropy = self.std.masked_fill(certain, 1.0).log() + HALF_LOG_TWO_PI + 0.5
        return entropy.masked_fill(certain, 0.0).expand_as(self.mean)


def times(index: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """When steps [B] of a flow of `steps` begin, 1 - index/steps, and end; float32 [B, 1, 1]."""
    begin, end = (1.0 - i.float() / steps for i in (index, index + 1))
    return begin[:, None, None], end[:, None, None]


def ode(x: Tensor, v: Tensor, t: Tensor, end: Tensor) -> Transition:
    """Euler step x - d v of the flow's ODE (arXiv 2210.02747): certain.

    Args:
        x: [B, H, D] state at `t`.
        v: [B, H, D] velocity there.
        t: when the step begins, broadcasts to `x`.
        end: when it ends.
    """
    return Transition(mean=x - v * (t - end), std=torch.zeros_like(t))


def flow_sde(x: Tensor, v: Tensor, t: Tensor, end: Tensor, level: Tensor) -> Transition:
    """Euler-Maruyama step of the SDE with the flow's marginals (Flow-GRPO, arXiv 2505.05470; piRL, 2510.25889).

    With s = a sqrt(t / (1 - t)), where the first step takes the second's time in the denominator: mean x - d (v +
    s^2 / (2 t) (x + (1 - t) v)), deviation s sqrt(d). `level` is a, broadcasts to `x`; the others are as in `ode`.
    """
    d = t - end
    variance = level.square() * t / (1.0 - torch.where(t >= 1.0, end, t))
    clean, noise = x - v * t, x + v * (1.0 - t)
    mean = clean * (1.0 - end) + noise * (end - variance * d / (2.0 * t))
    return Transition(mean=mean, std=(variance * d).sqrt())


def flow_cps(x: Tensor, v: Tensor, t: Tensor, end: Tensor, level: Tensor) -> Transition:
    """Step that keeps the amount of noise in the sample: coefficients-preserving sampling (arXiv 2509.05952).

    mean = clean (1 - end) + noise end cos(a pi / 2), deviation end sin(a pi / 2), so that the last step is certain.
    Arguments as in `flow_sde`.
    """
    angle = level * (math.pi / 2)
    mean = (x - v * t) * (1.0 - end) + (x + v * (1.0 - t)) * end * angle.cos()
    return Transition(mean=mean, std=end * angle.sin())


def flow_noise(x: Tensor, v: Tensor, t: Tensor, end: Tensor, std: Tensor) -> Transition:
    """Euler step plus noise of a learned deviation [B, H, D] (ReinFlow, arXiv 2505.22094; piRL's Flow-Noise)."""
    return Transition(mean=x - v * (t - end), std=std)


def annealed_level(first: float, last: float, updates: int, done: int) -> float:
    """Noise level a that falls (or rises) linearly over `updates` updates and then stays (an option of piRL's code)."""
    return first + (last - first) * min(done / updates, 1.0)
