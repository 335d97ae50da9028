"""Squashed Gaussian distribution of actions."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from embodyrl.policies.actor_critic.policy import GaussianHead
from embodyrl.types import FloatArray

_MAX_TANH = 1.0 - 1e-6


class SquashedHead(GaussianHead):
    """Tanh of a diagonal Gaussian whose mean and standard deviation depend on the observation.

    Outputs [B, K, 2A] are means and log standard deviations. Raw samples are the Gaussian's samples before tanh;
    log-probabilities are those after tanh (arXiv 1812.05905, appendix C). Actions are within their bounds, within a
    range of width 2 at their only bound, or in -1..1 without bounds.
    """

    def __init__(self, low: tuple[float | None, ...], high: tuple[float | None, ...]) -> None:
        super().__init__(low, high, 0.0)
        # The network outputs the standard deviation, so the parameter would be unused.
        del self.log_std

    def get_mean_and_log_std(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the log standard deviation before squashing, both [B, K, A]."""
        mean, log_std = outputs.chunk(2, -1)
        return mean, log_std.clamp(-20.0, 2.0)

    def score(self, outputs: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log density of tanh(choice) and a one-sample estimate of the entropy, both [B, K, A]."""
        logprob, _ = super().score(outputs, choice, temperature)
        # log(1 - tanh(u)^2) in a form that does not round to log(0).
        logprob = logprob - 2.0 * (math.log(2.0) - choice - functional.softplus(-2.0 * choice))
        return logprob, -logprob

    def sample(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled squashed actions [B, K * A] and their log densities [B], both with gradients."""
        mean, log_std = self.get_mean_and_log_std(outputs)
        choice = mean + log_std.exp() * torch.randn_like(mean)
        logprob, _ = self.score(outputs, choice, 1.0)
        return choice.tanh().flatten(1), logprob.sum((1, 2))

    def to_actions(self, choice: np.ndarray) -> FloatArray:
        """Convert samples before squashing to actions, both [B, K, A]."""
        return super().to_actions(np.tanh(choice))

    def from_actions(self, actions: FloatArray) -> np.ndarray:
        """Convert actions to samples before squashing, both [B, K, A]; actions are clipped so that atanh is finite."""
        return np.arctanh(self.normalize(actions).clip(-_MAX_TANH, _MAX_TANH))

    def normalize(self, actions: FloatArray) -> FloatArray:
        """Scale actions [B, K, A] from their bounds to -1..1."""
        return super().from_actions(actions).clip(-1.0, 1.0)
