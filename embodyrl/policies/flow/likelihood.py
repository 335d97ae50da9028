"""How likely a flow's action chunk is: noise, steps of a flow as Gaussians, chains of them, and FPO's estimate.

x is the state at t, v = v(x, t) the velocity with the target noise - data, d the length of a step. The clean estimate
is x - t v, the noise estimate x + (1 - t) v; t = 1 is noise, t = 0 is data.

Noise is a counter-based function of the uniform numbers that the run draws for an episode's chunk. One chunk needs many
more normal numbers than tokens are kept of it, and some of them again while training. They come from a seed of 48 bits
that the run's own numbers spell, by Philox (Salmon et al. 2011): nothing depends on batches.

Flow policy optimization takes ratios from differences of the flow-matching loss (arXiv 2507.21053).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.flow.settings import ChunkRecord, ChunkShape, FlowSettings, FpoRatio, JointLogprob, Likelihood
from embodyrl.policies.tensors import on_device
from embodyrl.types import FloatArray, IntArray, PolicySpec

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
    # At t = 1 the spread would be infinite: the first step takes the time at which it ends.
    variance = level.square() * t / (1.0 - torch.where(t >= 1.0, end, t))
    # What the network believes of both ends of the way; every step is a mix of the two.
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


START, PLACE, PAIRS, TIMES, STEP = range(5)
"""Streams of a seed: first state, stochastic step, noise and times of FPO's pairs, noise of step i (STEP + i)."""


def seeds_of(noise: FloatArray) -> IntArray:
    """Seeds [B] of 48 bits, from the first two of uniforms [B, L >= 2] in [0, 1) with 24 bits each."""
    # Exact: uniforms of 24 bits are whole multiples of 2^-24, in float64 as well.
    bits = (noise[:, :2].astype(np.float64) * 2**24).astype(np.int64)
    return bits[:, 0] << 24 | bits[:, 1]


def uniforms(seeds: IntArray, stream: int, count: int) -> np.ndarray:
    """[B, count] float64 strictly between 0 and 1."""
    philox = np.random.Philox(key=0)
    state = cast(Any, philox.state)
    out = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        state["state"]["key"][:] = seed, stream
        philox.state = state
        # The raw numbers, which no version of numpy may change.
        out[row] = (philox.random_raw(count) >> np.uint64(11)).astype(np.float64)
    return (out + 0.5) * 2.0**-53


def normals(seeds: IntArray, stream: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers [B, *shape], float32; the same on every device."""
    flat = uniforms(seeds, stream, int(np.prod(shape)))
    return on_device(torch.special.ndtri(torch.from_numpy(flat)).float(), device).unflatten(1, shape)


Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""State [B, H, D] and time [B] to velocity [B, H, D] and the expert's hidden rows [B, H, width]."""
NoiseStd = Callable[[Tensor], Tensor]
"""Hidden rows [B, H, width] to deviations [B, H, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One chunk per row, and what is kept of how it came about."""

    state: Tensor
    """[B, H, D] at t = 0; or what an actor beside a frozen model chose (see `SteeringActor`)."""
    tokens: IntArray
    """[B, T]"""
    logprob: Tensor
    """[B, K, P]"""

    @classmethod
    def greedily(cls, state: Tensor) -> Self:
        """Without chance nothing is kept, and nothing has a probability."""
        nothing = torch.zeros(len(state), 1, 0, device=state.device)
        return cls(state=state, tokens=np.zeros((len(state), 0), np.int64), logprob=nothing)

    def kept(self, spec: PolicySpec) -> tuple[IntArray, FloatArray]:
        """Tokens and log-probabilities [B, L], filled up with zeros."""
        tokens = np.zeros((len(self.tokens), spec.tokens_per_chunk), np.int64)
        tokens[:, : self.tokens.shape[1]] = self.tokens
        return tokens, spread(self.logprob, spec).cpu().numpy()


def spread(numbers: Tensor, spec: PolicySpec) -> Tensor:
    """[B, L] of numbers [B, K, P]: each action's at the beginning of its share of the tokens, the rest of it is 0."""
    share = spec.tokens_per_chunk // numbers.shape[1]
    return torch.nn.functional.pad(numbers, (0, share - numbers.shape[2])).flatten(1)


class ChunkLikelihood(Protocol):
    """Samples chunks, and says later how likely they were: the same numbers by the same operations.

    A row of a result depends on that row alone.
    """

    record: ChunkRecord

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> Chosen:
        """Sample one chunk per seed [B]; without gradients."""
        ...

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, K, P] of what `sample` kept, with gradients."""
        ...


def follow_ode(velocity: Velocity, x: Tensor, steps: int) -> Tensor:
    """The chunk [B, H, D] to which noise x [B, H, D] flows in `steps` Euler steps."""
    for k in range(steps):
        t, end = times(torch.full((len(x),), k, device=x.device), steps)
        x = ode(x, velocity(x, t.flatten())[0], t, end).mean
    return x


class GaussianChain(ABC):
    """Gaussian steps: one stochastic step per chunk, or all of them; implements `ChunkLikelihood`.

    One step: the others are certain and only the two states around it are kept (the mixed form of piRL, arXiv
    2510.25889; there one index serves a batch, here each chunk draws its own). All steps: the states after each are
    kept, the first is drawn again from its seed.

    Log-probabilities are those of the executed numbers: of the one step, or summed over all steps and the first state
    and divided by `terms`. Temperature multiplies the deviations, except the first state's.
    """

    def __init__(
        self, record: ChunkRecord, *, num_steps: int, every_step: bool, drawn_steps: int, terms: int = 1
    ) -> None:
        """Chains of `num_steps` steps; the one stochastic step is one of the first `drawn_steps`."""
        self.record = record
        self._shape, self._num_steps, self._every = record.shape, num_steps, every_step
        self._drawn_steps, self._terms = drawn_steps, terms

    @abstractmethod
    def _step(self, velocity: Velocity, x: Tensor, index: Tensor) -> tuple[Transition, Transition]:
        """The stochastic step at states [B, H, D] and their steps [B], and the certain one."""

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> Chosen:
        """Follow the flow from drawn noise (see `ChunkLikelihood`)."""
        size = (self._shape.horizon, self._shape.width)
        # Each chunk draws its own step: one for a whole batch would make a row depend on what it was batched with.
        place = (uniforms(seeds, PLACE, 1)[:, 0] * self._drawn_steps).astype(np.int64)
        chosen = on_device(place, device)[:, None, None]
        x = normals(seeds, START, size, device)
        logprob = self._first_step(x)[0]
        begun, last = [], x
        # One noise for the one step, wherever it falls; else one for each.
        noise = normals(seeds, STEP, size, device)
        for k in range(self._num_steps):
            here = torch.full_like(chosen, True, dtype=torch.bool) if self._every else chosen == k
            # Both from one pass of the network, whichever of them a row takes.
            step, certain = self._tempered(velocity, x, torch.full((len(x),), k, device=device), temperature)
            if self._every and k:
                noise = normals(seeds, STEP + k, size, device)
            after = torch.where(here, step.mean + step.std * noise, certain.mean)
            logprob = logprob + self._executed(step).log_prob(self._part(after)) * here
            begun.append(x)
            last = torch.where(here, after, last)
            x = after
        states = torch.stack(begun, 1)  # [B, steps, H, D]
        kept = states[:, 1:] if self._every else states[torch.arange(len(x), device=device), chosen.flatten(), None]
        # Whole states where the network will be asked again; of what a step led to, only the numbers that are scored.
        floats = torch.cat([kept.flatten(1), self._part(last).flatten(1)], 1)
        tokens = self.record.layout.pack((seeds if self._every else place)[:, None], floats.cpu().numpy())
        return Chosen(state=x, tokens=tokens, logprob=logprob / self._terms)

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Score kept states (see `ChunkLikelihood`)."""
        whole, floats = self.record.layout.unpack(tokens)
        shape, values = self._shape, on_device(floats, device)
        last = shape.executed * shape.action_dim
        begun = list(values[:, :-last].unflatten(1, (-1, shape.horizon, shape.width)).unbind(1))
        afters = [values[:, -last:].unflatten(1, (shape.executed, shape.action_dim))]
        indices = [on_device(whole[:, 0], device)]
        logprob = entropy = values.new_zeros(())
        if self._every:
            afters = [*(self._part(state) for state in begun), *afters]
            # Of the first state only the seed was kept.
            begun = [normals(whole[:, 0], START, (shape.horizon, shape.width), device), *begun]
            indices = [torch.full((len(values),), k, device=device) for k in range(len(begun))]
            logprob, entropy = self._first_step(begun[0])
        for x, after, index in zip(begun, afters, indices, strict=True):
            step = self._executed(self._tempered(velocity, x, index, temperature)[0])
            logprob, entropy = logprob + step.log_prob(after), entropy + step.entropy()
        return logprob / self._terms, entropy / self._terms

    def _tempered(
        self, velocity: Velocity, x: Tensor, index: Tensor, temperature: float
    ) -> tuple[Transition, Transition]:
        step, certain = self._step(velocity, x, index)
        return Transition(mean=step.mean, std=(step.std * temperature).expand_as(x)), certain

    def _first_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [B, K, A] of the first state; 0 where only one step counts."""
        prior = self._executed(Transition(mean=torch.zeros_like(x), std=torch.ones_like(x)))
        weight = float(self._every)
        return prior.log_prob(self._part(x)) * weight, prior.entropy() * weight

    def _part(self, x: Tensor) -> Tensor:
        """The executed numbers [B, K, A] of a state."""
        return x[:, : self._shape.executed, : self._shape.action_dim]

    def _executed(self, step: Transition) -> Transition:
        return Transition(mean=self._part(step.mean), std=self._part(step.std))


class ChainLikelihood(GaussianChain):
    """Steps of a flow; `joint_logprob` may divide the sum over all of them by their count."""

    def __init__(self, cfg: FlowSettings, shape: ChunkShape, noise_std: NoiseStd | None) -> None:
        mean = cfg.every_step and cfg.joint_logprob is JointLogprob.mean
        super().__init__(
            ChunkRecord.of(cfg, shape),
            num_steps=cfg.num_steps,
            every_step=cfg.every_step,
            drawn_steps=cfg.drawn_steps,
            terms=cfg.num_steps + 1 if mean else 1,
        )
        self._cfg, self._noise_std = cfg, noise_std

    def _step(self, velocity: Velocity, x: Tensor, index: Tensor) -> tuple[Transition, Transition]:
        """The stochastic step of this likelihood, and the ODE's."""
        t, end = times(index, self._cfg.num_steps)
        v, hidden = velocity(x, t.flatten())
        if self._noise_std is not None:
            step = flow_noise(x, v, t, end, self._noise_std(hidden))
        else:
            level = x.new_tensor(self._cfg.noise_level)
            step = (flow_cps if self._cfg.likelihood is Likelihood.flow_cps else flow_sde)(x, v, t, end, level)
        return step, ode(x, v, t, end)


MAX_LOSS_CHANGE = 3.0
"""Bound of the change of one pair's loss before exp, as in the public code."""


class FpoLikelihood:
    """Chunks of the ODE from random noise; implements `ChunkLikelihood`.

    The "log-probability" of an executed action is minus its flow-matching loss (mean over its numbers) at N pairs of
    noise and time in (0, 1) that belong to the chunk: averaged over them, or one for each, then bounded to +-3 around
    what it was when the chunk was chosen. Kept are the chunk and the seed that the pairs are drawn from; losses only
    for the bound. A difference of two of them estimates a log-ratio; alone they are no densities, and the entropy is 0.
    """

    def __init__(self, cfg: FlowSettings, shape: ChunkShape) -> None:
        self._cfg, self._shape = cfg, shape
        self._each = cfg.fpo_ratio is FpoRatio.sample
        self.record = ChunkRecord.of(cfg, shape)

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> Chosen:
        """Follow the ODE from drawn noise (see `ChunkLikelihood`)."""
        size = (self._shape.horizon, self._shape.width)
        x = follow_ode(velocity, normals(seeds, START, size, device) * temperature, self._cfg.num_steps)
        logprob = self._minus_loss(velocity, x, seeds)
        floats = torch.cat([x.flatten(1), *([logprob.flatten(1)] if self._each else [])], 1)
        return Chosen(state=x, tokens=self.record.layout.pack(seeds[:, None], floats.cpu().numpy()), logprob=logprob)

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Measure the losses again (see `ChunkLikelihood`)."""
        whole, floats = self.record.layout.unpack(tokens)
        values, shape = on_device(floats, device), self._shape
        split = shape.horizon * shape.width
        x = values[:, :split].unflatten(1, (shape.horizon, shape.width))
        logprob = self._minus_loss(velocity, x, whole[:, 0])
        if self._each:
            old = values[:, split:].unflatten(1, (shape.executed, self.record.per_action))
            logprob = old + (logprob - old).clamp(-MAX_LOSS_CHANGE, MAX_LOSS_CHANGE)
        return logprob, torch.zeros_like(logprob)

    def _minus_loss(self, velocity: Velocity, x: Tensor, seeds: IntArray) -> Tensor:
        """[B, K, P] of chunks [B, H, D]."""
        shape, count = self._shape, self._cfg.fpo_pairs
        noise = normals(seeds, PAIRS, (count, shape.horizon, shape.width), x.device)
        t = on_device(uniforms(seeds, TIMES, count).astype(np.float32), x.device)
        losses = [
            flow_matching_error(velocity, x, noise[:, i], t[:, i])[:, : shape.executed, : shape.action_dim].mean(2)
            for i in range(count)
        ]
        stacked = torch.stack(losses, 2)
        return -stacked if self._each else -stacked.mean(2, keepdim=True)


def flow_matching_error(velocity: Velocity, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Squared error [B, H, D] of the velocity on the straight way from chunks x to noise, both [B, H, D], at t [B].

    The state is t noise + (1 - t) x, the target noise - x (arXiv 2210.02747, pi0's direction of time).
    """
    at = t[:, None, None]
    v, _ = velocity(at * noise + (1.0 - at) * x, t)
    return (v - (noise - x)).square()
