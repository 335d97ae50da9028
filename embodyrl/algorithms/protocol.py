"""The algorithm seam: advantages (numpy, in the driver) and losses (torch, in the actor), both pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.registry import Registry
from embodyrl.types import BoolArray, Episode, FloatArray, PolicyScores, PreparedBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch of chunk samples (torch, fp32, on the actor's device)."""

    old_logprob: torch.Tensor
    """[B, L]"""
    ref_logprob: torch.Tensor | None
    """[B, L]; None where no KL is asked for."""
    advantage: torch.Tensor
    """[B, K]"""
    returns: torch.Tensor
    """[B, V]"""
    old_value: torch.Tensor
    """[B, V]"""
    valid: torch.Tensor
    """[B, K] bool"""
    weight: torch.Tensor
    """[B, K] weight of each action in the policy loss, taken over the whole optimizer step, so that micro-batch losses
    add up to the global aggregate whatever the split; sums to 1 for the mean modes of `loss_agg_func`."""
    value_weight: torch.Tensor
    """[B, V] weight of each value target; sums to 1 over the optimizer step."""


class Algorithm(Protocol):
    """An advantage estimator and a loss, bound to one config."""

    needs_groups: bool
    """Members of a group must share a reset id, and the group size must exceed 1."""
    needs_values: bool
    counts_chunk_steps: bool
    """The quota of a step is chunk steps per slot (episodes are cut and bootstrapped), not a list of episodes."""
    needs_reference: bool

    def prepare(self, episodes: Sequence[Episode]) -> PreparedBatch:
        """Turn finished episodes into advantages and value targets.

        Raises:
            NonFiniteError: a reward, value or advantage is not finite; names the episode.
        """
        ...

    def weights(self, batch: PreparedBatch, samples: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Return (weight [n, K], value_weight [n, V]) float32 of one optimizer step, all ranks."""
        ...

    def inert(self, batch: PreparedBatch) -> BoolArray:
        """Return [B] samples whose gradient is exactly zero; the actor spares their forward and backward pass."""
        ...

    def loss(self, scores: PolicyScores, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch (a share of the optimizer step's loss) and detached metric shares.

        `metrics.merge_metrics` joins the shares of all micro-batches and ranks of one optimizer step.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What an estimator says about one episode."""

    advantage: FloatArray
    """[T, K]; entries of actions that were not executed are ignored."""
    returns: FloatArray
    """[T, V] value targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """What `adv_type` names."""

    compute: Callable[[Sequence[Episode], AlgorithmConfig], list[Credit]]
    """Credits aligned with the episodes of one training step."""
    consumes: frozenset[str]
    """Keys below `algorithm` that this estimator reads besides the common ones."""
    needs_groups: bool
    needs_values: bool
    counts_chunk_steps: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A policy loss before aggregation; tensors have the shape of the log-probabilities given."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Probability ratio new / old."""
    clipped: torch.Tensor
    """bool, the clip removed the gradient of this entry."""


class PolicyLossFn(Protocol):
    """Unit-wise policy loss; a unit is a token, an action or a chunk (`logprob_type`)."""

    def __call__(
        self, logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, cfg: AlgorithmConfig
    ) -> LossTerms:
        """`advantage` has the rank of `logprob` and broadcasts over its last axis."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What `loss_type` names."""

    compute: PolicyLossFn
    consumes: frozenset[str]
    """Keys below `algorithm` that this loss reads besides the common ones."""


ADVANTAGES: Registry[AdvantageEstimator] = Registry("adv_type", group="embodyrl.advantages")
LOSSES: Registry[PolicyLoss] = Registry("loss_type", group="embodyrl.losses")


def build_algorithm(cfg: AlgorithmConfig) -> Algorithm:
    """Bind the estimator and the loss named in the config.

    Raises:
        ConfigError: unknown names or combinations that make no sense.
    """
    from embodyrl.algorithms.policy_gradient import PolicyGradient

    return PolicyGradient(cfg)
