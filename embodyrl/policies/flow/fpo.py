"""Flow policy optimization: ratios of likelihoods from differences of the flow-matching loss (arXiv 2507.21053)."""

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.flow.chain import Chosen, Velocity, follow_ode
from embodyrl.policies.flow.draws import PAIRS, START, TIMES, normals, uniforms
from embodyrl.policies.flow.record import ChunkRecord, ChunkShape
from embodyrl.policies.flow.settings import FlowSettings, FpoRatio
from embodyrl.policies.transfer import on_device
from embodyrl.types import IntArray

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
