"""Real-time chunking for flow policies: chunks that continue the previous chunk.

Guidance is pseudo-inverse inpainting (arXiv 2506.07339). In the trained form, the network receives the committed
actions without noise (arXiv 2512.05964). t = 1 is noise, t = 0 is data, v has the target noise - data.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.flow.settings import RtcMask
from embodyrl.policies.vla.chains import Velocity
from embodyrl.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Remaining actions of the previous chunk, in the units of the flow, for B observations."""

    rows: Tensor
    """[B, H, D] committed actions at their indices in the new chunk, followed by padding."""
    weight: Tensor
    """[B, H, 1] guidance weights."""
    frozen: Tensor
    """[B, H, 1] bool: True for an action that is executed before this chunk begins."""

    @classmethod
    def of(cls, rows: Tensor, counts: Tensor, mask: RtcMask) -> Self:
        """Create a `Committed` from actions `rows` [B, H, D].

        `counts` [B, 2] contains the delay and the number of remaining actions of the previous chunk.
        """
        delay, end = torch.minimum(counts[:, 0], counts[:, 1]), counts[:, 1]
        place = torch.arange(rows.shape[1], device=rows.device)
        return cls(
            rows=rows,
            weight=guidance_weights(delay, end, rows.shape[1], mask)[..., None],
            frozen=(place < delay[:, None])[..., None],
        )

    def fixed(self, x: Tensor) -> Tensor:
        """Return x [B, H, D] with the frozen actions replaced by the committed actions."""
        return torch.where(self.frozen, self.rows, x)


def guidance_weights(delay: Tensor, end: Tensor, horizon: int, mask: RtcMask) -> Tensor:
    """Return guidance weights [B, H] for delays [B] and the index `end` [B] at which the previous chunk ends.

    The weight is 1 before the delay and 0 from the end on. In between, action i has the weight
    c (e^c - 1) / (e - 1), c, 1 or 0 (`mask`), with c = (end - i) / (end - delay + 1).
    """
    place = torch.arange(horizon, device=delay.device)
    delay, end = delay[:, None], end[:, None]
    share = (end - place) / (end - delay + 1)
    between = {
        RtcMask.exp: share * torch.expm1(share) / math.expm1(1.0),
        RtcMask.linear: share,
        RtcMask.ones: torch.ones_like(share),
        RtcMask.zeros: torch.zeros_like(share),
    }[mask]
    weight = torch.where(place < delay, torch.ones_like(share), between)
    return torch.where(place < end, weight, torch.zeros_like(share))


def guided(
    velocity: Velocity, committed: Committed, x: Tensor, t: Tensor, *, limit: float, through_network: bool
) -> tuple[Tensor, Tensor]:
    """Return the velocity [B, H, D] guided towards the committed actions, and the hidden states.

    v' = v - min(limit, ((1-t)^2 + t^2) / (t (1-t))) g. g is the vector-Jacobian product of the data estimate x - t v
    with the weighted difference between committed actions and estimate. With `through_network` False, g is the
    weighted difference. The gradient of the network's weights treats g as a constant.
    """
    at, trains = t[:, None, None], torch.is_grad_enabled()
    if through_network:
        with torch.enable_grad():
            start = x.detach().requires_grad_(True)
            v, hidden = velocity(start, t)
            estimate = start - at * v
            error = (committed.rows - estimate.detach()) * committed.weight
            (pull,) = torch.autograd.grad(estimate, start, error)
        v, hidden = velocity(x, t) if trains else (v.detach(), hidden.detach())
    else:
        v, hidden = velocity(x, t)
        pull = ((committed.rows - (x - at * v)) * committed.weight).detach()
    factor = ((1 - at).square() + at.square()) / (at * (1 - at))
    return v - factor.clamp(max=limit) * pull, hidden


def conditioned(velocity: Velocity, committed: Committed, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return velocity [B, H, D] and hidden states for x, with the committed actions in place of frozen actions.

    The time of the committed actions is 0, because they contain no noise.
    """
    times = t[:, None].expand(x.shape[:2]).masked_fill(committed.frozen[..., 0], 0.0)
    return velocity(committed.fixed(x), times)


def simulated_delays(u: FloatArray, longest: int) -> IntArray:
    """Map uniform random numbers [B] to simulated delays [B]: 0 in half of the samples, else uniform in 1..longest.

    The first chunk of an episode has no delay. With delays uniform in 0..D, only one of D + 1 samples would train the
    first action of a chunk.
    """
    delayed = 1 + np.floor((2.0 * u - 1.0) * longest).astype(np.int64)
    return np.where(u < 0.5, 0, np.minimum(delayed, longest))


def delayed_loss(velocity: Velocity, x: Tensor, noise: Tensor, t: Tensor, delay: Tensor, executed: Tensor) -> Tensor:
    """Return the flow-matching loss [B] of the actions after the committed actions, which are noise-free inputs.

    Args:
        velocity: velocity of states [B, H, D] at times [B, H].
        x: chunks [B, H, D].
        noise: noise [B, H, D].
        t: time of each chunk [B].
        delay: number of committed actions [B], below H.
        executed: executed actions [B, H, D], which may differ from the chunks; the committed actions are the first.
    """
    predicted = torch.arange(x.shape[1], device=x.device) >= delay[:, None]
    at = t[:, None] * predicted
    state = torch.where(predicted[..., None], at[..., None] * noise + (1.0 - at[..., None]) * x, executed)
    error = (velocity(state, at)[0] - (noise - x)).square().mean(2)
    return (error * predicted).sum(1) / predicted.sum(1)
