"""Action distributions of the policy: categorical per action dimension, or Gaussian.

Raw samples of a head, the `choice` [B, K, A], are category ids (int64), or real numbers where -1..1 spans the range
of a bounded action dimension.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.policies.actor_critic.shape import NetShape
from embodyrl.policies.tensors import categorical_scores, sample_inverse_cdf, standard_normal
from embodyrl.types import FloatArray, IntArray

_NEVER = -1e9
"""Logit of padded categories: their probability is exactly 0, and 0 * -1e9 is finite."""


class CategoricalHead(nn.Module):
    """One categorical distribution per action dimension; temperature divides the logits."""

    _place: Tensor
    _padding: Tensor

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        widest = max(sizes)
        self._even = (len(sizes), widest) if min(sizes) == widest else None
        """(number of dimensions, categories per dimension) if all dimensions have the same number of categories."""
        starts = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
        column = torch.arange(widest)
        padding = column[None] >= torch.tensor(sizes)[:, None]
        self.register_buffer("_place", (starts[:, None] + column).masked_fill(padding, 0), persistent=False)
        self.register_buffer("_padding", padding, persistent=False)

    def choose(self, outputs: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
        """Sample category ids [B, K, A] from outputs [B, K, O] with uniform noise [B, K, A]; None: greedy."""
        logits = self._logits(outputs, temperature)
        if noise is None:
            return logits.argmax(-1)
        drawn = sample_inverse_cdf(logits, noise)
        # A rounded sum may be below 1, and the last entries of short dimensions are padding.
        return drawn if self._even else drawn.minimum((~self._padding).sum(-1) - 1)

    def score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of category ids, all [B, K, A]."""
        return categorical_scores(self._logits(outputs, temperature), choice)

    def to_tokens(self, choice: Tensor) -> IntArray:
        """Flatten category ids [B, K, A] to tokens [B, L], L = K A."""
        return choice.flatten(1).cpu().numpy()

    def to_choice(self, tokens: IntArray) -> np.ndarray:
        """Return category ids [B, L]; tokens are the ids."""
        return tokens

    def to_actions(self, choice: np.ndarray) -> FloatArray:
        """Convert category ids to actions, both [B, K, A]."""
        return choice.astype(np.float32)

    def from_actions(self, actions: FloatArray) -> np.ndarray:
        """Convert actions to category ids, both [B, K, A]."""
        return np.rint(actions).astype(np.int64)

    def _logits(self, outputs: Tensor, temperature: float) -> Tensor:
        """Return logits [B, K, A, C]; C: largest number of categories of a dimension."""
        outputs = outputs if temperature == 1.0 else outputs / temperature
        if self._even:  # no padding needed
            return outputs.view(*outputs.shape[:-1], *self._even)
        return outputs[..., self._place].masked_fill(self._padding, _NEVER)


class GaussianHead(nn.Module):
    """Diagonal Gaussian over actions; its standard deviation [A] does not depend on the observation.

    Same interface as `CategoricalHead`. Temperature multiplies the standard deviation. Samples are unbounded: the
    environment clips the action. A token is the bit pattern of a float32 sample, so that log-probabilities are those
    of the exact samples.

    With a correlation r the noise of a chunk is autoregressive, e_k = r e_(k-1) + sqrt(1 - r^2) n_k (Korenkevych et
    al., arXiv 1903.11524, order 1): it has the same deviation as n, but its sum over K actions does not average out.
    An action's log-probability is conditioned on the previous action; the chunk's log-probability is the sum.
    """

    def __init__(
        self, low: tuple[float | None, ...], high: tuple[float | None, ...], log_std: float, correlation: float = 0.0
    ) -> None:
        super().__init__()
        self._correlation, self._fresh = correlation, math.sqrt(1.0 - correlation**2)
        self.log_std = nn.Parameter(torch.full((len(low),), log_std))
        self._centre, self._half = np.asarray([*map(_span, low, high)], np.float32).T

    def spread(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, K, A], equal to the outputs, and the log standard deviation [A]."""
        return outputs, self.log_std

    def choose(self, outputs: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
        """Sample raw actions [B, K, A] by the inverse CDF of uniform noise [B, K, A]; None: the mean."""
        mean, log_std = self.spread(outputs)
        if noise is None:
            return mean
        deviation = log_std.exp() if temperature == 1.0 else log_std.exp() * temperature
        return mean + deviation * self._linked(standard_normal(noise))

    def score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log density and the entropy of raw samples, all [B, K, A]."""
        mean, log_std = self.spread(outputs)
        log_std = log_std if temperature == 1.0 else log_std + math.log(temperature)
        distance = (choice - mean) / log_std.exp()
        if self._correlation:
            fresh = (distance[:, 1:] - self._correlation * distance[:, :-1]) / self._fresh
            distance = torch.cat([distance[:, :1], fresh], 1)
            log_std = log_std + math.log(self._fresh) * (torch.arange(mean.shape[1]) > 0).to(mean)[:, None]
        logprob = torch.addcmul(-log_std - _LOG_ROOT, distance, distance, value=-0.5)
        return logprob, (log_std + (0.5 + _LOG_ROOT)).expand_as(logprob)

    def _linked(self, noise: Tensor) -> Tensor:
        """Return autoregressive noise from normal noise [B, K, A]: consecutive actions of a chunk are correlated."""
        if not self._correlation:
            return noise
        steps = [noise[:, 0]]
        for fresh in noise[:, 1:].unbind(1):
            steps.append(self._correlation * steps[-1] + self._fresh * fresh)
        return torch.stack(steps, 1)

    def to_tokens(self, choice: Tensor) -> IntArray:
        """Convert raw samples [B, K, A] to tokens [B, L], the bit patterns of float32."""
        return choice.flatten(1).cpu().numpy().astype(np.float32, copy=False).view(np.int32).astype(np.int64)

    def to_choice(self, tokens: IntArray) -> np.ndarray:
        """Convert tokens [B, L] back to raw samples [B, L] without rounding."""
        return tokens.astype(np.int32).view(np.float32)

    def to_actions(self, choice: np.ndarray) -> FloatArray:
        """Scale raw samples to actions, both [B, K, A]: -1..1 spans the bounds."""
        return self._centre + self._half * choice

    def from_actions(self, actions: FloatArray) -> np.ndarray:
        """Convert actions to choices, both [B, K, A]."""
        return ((actions - self._centre) / self._half).astype(np.float32)


_LOG_ROOT = 0.5 * math.log(2 * math.pi)


def _span(low: float | None, high: float | None) -> tuple[float, float]:
    """Return centre and half width of the actions that -1..1 spans; a missing bound is 2 from the other bound."""
    if low is None and high is None:
        return 0.0, 1.0
    if low is None or high is None:  # around 0, all samples could be outside
        return (low + 1.0 if low is not None else float(high or 0.0) - 1.0), 1.0
    # A dimension with one value has no span; avoid dividing by it.
    return (low + high) / 2, (high - low) / 2 or 1.0


def build_head(shape: NetShape, log_std: float = 0.0, correlation: float = 0.0) -> CategoricalHead | GaussianHead:
    """Build the head of an action space; `log_std` (initial) and noise `correlation` apply to continuous actions."""
    if shape.sizes:
        return CategoricalHead(shape.sizes)
    return GaussianHead(shape.low, shape.high, log_std, correlation)
