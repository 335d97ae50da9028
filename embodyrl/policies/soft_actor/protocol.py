"""Interface of policies for soft actor-critic."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from embodyrl.policies.protocol import Policy
from embodyrl.types import FloatArray, IntArray, Observation


class CriticPolicy(Policy, Protocol):
    """Interface of a policy that builds critics for its action chunks."""

    width: int
    """L: number of sampled values per chunk."""
    frozen: bool
    """True if the features of an observation never change, so that they are stored instead of the observation."""

    def features(self, obs: Observation) -> torch.Tensor:
        """Return features [B, F] of observations."""
        ...

    def tokens_to_chunks(self, tokens: IntArray) -> torch.Tensor:
        """Convert tokens from `act` to chunks [B, L] in -1..1; a correction of a whole chunk is repeated per action."""
        ...

    def normalize(self, actions: FloatArray, obs: Observation | None) -> torch.Tensor:
        """Convert actions [B, K, A] in the units of `act` to the chunks [B, L] that `tokens_to_chunks` returns.

        A `frozen` policy needs the observations `obs`. Residual policies return corrections, which may exceed -1..1.
        """
        ...

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Build critics that map features [B, F] and chunks [B, L] to values [count, B]."""
        ...


@runtime_checkable
class SoftActor(CriticPolicy, Protocol):
    """Interface of a policy for soft actor-critic: reparameterized samples with gradients, and critics.

    The results of `features` are the inputs of actor and critics, with gradients.
    """

    encoder: Sequence[nn.Parameter]
    """Weights of the encoder that the critic loss trains; empty if `features` has no trainable weights."""

    def sample(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled chunks [B, L] in -1..1 and their log-probabilities [B], both with gradients."""
        ...


@runtime_checkable
class RegressionActor(CriticPolicy, Protocol):
    """Interface of a policy whose greedy chunks are a differentiable function of its weights (TD3+BC)."""

    def propose(self, obs: Observation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of the critics [B, F] and the greedy chunks [B, L], both with gradients."""
        ...
