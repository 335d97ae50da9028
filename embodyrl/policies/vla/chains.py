"""Log-probabilities of action chunks sampled by a chain of Gaussian steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.records import ChunkRecord
from embodyrl.policies.vla.sampling import START, STEP, STEP_INDEX, SampledChunks, sample_normals, sample_uniforms
from embodyrl.types import IntArray

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """State after a step: mean + std * e with standard normal e; std 0 means a deterministic step."""

    mean: Tensor
    """[B, H, D] mean."""
    std: Tensor
    """Standard deviation, broadcastable to the shape of `mean`."""

    def log_prob(self, after: Tensor) -> Tensor:
        """Return the log-density of each element of `after` [B, H, D]; 0 for a deterministic step."""
        deterministic = self.std == 0
        std = self.std.masked_fill(deterministic, 1.0)
        density = -0.5 * ((after - self.mean) / std).square() - std.log() - HALF_LOG_TWO_PI
        return density.masked_fill(deterministic, 0.0)

    def entropy(self) -> Tensor:
        """Return the differential entropy 0.5 ln(2 pi e std^2) of each element [B, H, D]; 0 if deterministic."""
        deterministic = self.std == 0
        entropy = self.std.masked_fill(deterministic, 1.0).log() + HALF_LOG_TWO_PI + 0.5
        return entropy.masked_fill(deterministic, 0.0).expand_as(self.mean)


Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from state [B, H, D] and time [B] to velocity [B, H, D] and the expert's hidden states [B, H, width]."""


class GaussianChain(ABC):
    """Chain of Gaussian denoising steps, of which one or all are stochastic.

    With one stochastic step, only the states before and after this step are stored (the mixed form of piRL, arXiv
    2510.25889, which uses one index per batch; here each chunk samples its own index). With all steps stochastic, the
    states after each step are stored, and the first state is regenerated from its seed. Log-probabilities are those of
    the executed actions: of one step, or summed over all steps and the first state and divided by `terms`. Temperature
    multiplies the standard deviations, except that of the first state.
    """

    def __init__(
        self, record: ChunkRecord, *, num_steps: int, every_step: bool, sampled_steps: int, terms: int = 1
    ) -> None:
        """Set up chains of `num_steps` denoising steps.

        Without `every_step`, one random step among the first `sampled_steps` steps is stochastic.
        """
        self.record = record
        self._shape, self._num_steps, self._every_step = record.shape, num_steps, every_step
        self._sampled_steps, self._terms = sampled_steps, terms

    @abstractmethod
    def _step(self, velocity: Velocity, x: Tensor, index: Tensor) -> tuple[Transition, Transition]:
        """Return the stochastic and the deterministic step that start at states x [B, H, D] with step indices [B]."""

    def sample(self, velocity: Velocity, seeds: IntArray, device: torch.device, temperature: float) -> SampledChunks:
        """Sample one chunk per seed [B] from noise, without gradients; chunks do not depend on other seeds."""
        size = (self._shape.horizon, self._shape.width)
        # Each chunk samples its own step: one step per batch would make rows depend on the batch composition.
        step_index = (sample_uniforms(seeds, STEP_INDEX, 1)[:, 0] * self._sampled_steps).astype(np.int64)
        stochastic_step = to_device(step_index, device)[:, None, None]
        x = sample_normals(seeds, START, size, device)
        logprob = self._score_initial_noise(x)[0]
        starts, last = [], x
        # The single stochastic step uses this noise; if all steps are stochastic, each has its own noise.
        noise = sample_normals(seeds, STEP, size, device)
        for k in range(self._num_steps):
            is_stochastic = (
                torch.full_like(stochastic_step, True, dtype=torch.bool) if self._every_step else stochastic_step == k
            )
            # Both steps use the same forward pass; each row uses one of both steps.
            step, deterministic = self._build_step(velocity, x, torch.full((len(x),), k, device=device), temperature)
            if self._every_step and k:
                noise = sample_normals(seeds, STEP + k, size, device)
            after = torch.where(is_stochastic, step.mean + step.std * noise, deterministic.mean)
            logprob = logprob + self._select_executed_step(step).log_prob(self._select_executed(after)) * is_stochastic
            starts.append(x)
            last = torch.where(is_stochastic, after, last)
            x = after
        states = torch.stack(starts, 1)  # [B, steps, H, D]
        stored_states = (
            states[:, 1:]
            if self._every_step
            else states[torch.arange(len(x), device=device), stochastic_step.flatten(), None]
        )
        # Store full states where the network is evaluated again, but only the scored numbers of the last state.
        floats = torch.cat([stored_states.flatten(1), self._select_executed(last).flatten(1)], 1)
        tokens = self.record.layout.pack((seeds if self._every_step else step_index)[:, None], floats.cpu().numpy())
        return SampledChunks(state=x, tokens=tokens, logprob=logprob / self._terms)

    def score(
        self, velocity: Velocity, tokens: IntArray, device: torch.device, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [B, K, P] of the tokens of `sample`, with gradients."""
        integers, floats = self.record.layout.unpack(tokens)
        shape, values = self._shape, to_device(floats, device)
        last = shape.executed * shape.action_dim
        starts = list(values[:, :-last].unflatten(1, (-1, shape.horizon, shape.width)).unbind(1))
        ends = [values[:, -last:].unflatten(1, (shape.executed, shape.action_dim))]
        indices = [to_device(integers[:, 0], device)]
        logprob = entropy = values.new_zeros(())
        if self._every_step:
            ends = [*(self._select_executed(state) for state in starts), *ends]
            # Only the seed of the first state is stored.
            starts = [sample_normals(integers[:, 0], START, (shape.horizon, shape.width), device), *starts]
            indices = [torch.full((len(values),), k, device=device) for k in range(len(starts))]
            logprob, entropy = self._score_initial_noise(starts[0])
        for x, after, index in zip(starts, ends, indices, strict=True):
            step = self._select_executed_step(self._build_step(velocity, x, index, temperature)[0])
            logprob, entropy = logprob + step.log_prob(after), entropy + step.entropy()
        return logprob / self._terms, entropy / self._terms

    def _build_step(
        self, velocity: Velocity, x: Tensor, index: Tensor, temperature: float
    ) -> tuple[Transition, Transition]:
        step, deterministic = self._step(velocity, x, index)
        return Transition(mean=step.mean, std=(step.std * temperature).expand_as(x)), deterministic

    def _score_initial_noise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [B, K, A] of the initial noise; both 0 if only one step is stochastic."""
        prior = self._select_executed_step(Transition(mean=torch.zeros_like(x), std=torch.ones_like(x)))
        weight = float(self._every_step)
        return prior.log_prob(self._select_executed(x)) * weight, prior.entropy() * weight

    def _select_executed(self, x: Tensor) -> Tensor:
        """Return the executed actions [B, K, A] in a denoising state x [B, H, D]."""
        return x[:, : self._shape.executed, : self._shape.action_dim]

    def _select_executed_step(self, step: Transition) -> Transition:
        return Transition(mean=self._select_executed(step.mean), std=self._select_executed(step.std))
