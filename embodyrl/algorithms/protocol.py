"""The algorithm seam: advantages (numpy, in the driver) and losses (torch, in the actor), both pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.registry import Registry
from embodyrl.types import Episode, PolicyScores, PreparedBatch

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
    """[B, K] weight of each action in the policy loss; sums to 1 over the whole optimizer step, so that micro-batch
    losses add up to the global aggregate whatever the split."""
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
        """Turn finished episodes into advantages and value targets."""
        ...

    def weights(self, batch: PreparedBatch, samples: Sequence[int]) -> tuple[object, object]:
        """Return (weight [n, K], value_weight [n, V]) float32 arrays of the samples of one optimizer step."""
        ...

    def loss(self, scores: PolicyScores, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch (a share of the optimizer step's loss) and detached metric shares."""
        ...


ADVANTAGES: Registry[object] = Registry("adv_type", group="embodyrl.advantages")
LOSSES: Registry[object] = Registry("loss_type", group="embodyrl.losses")


def build_algorithm(cfg: AlgorithmConfig) -> Algorithm:
    """Bind the estimator and the loss named in the config."""
    from embodyrl.algorithms.policy_gradient import PolicyGradient

    return PolicyGradient(cfg)
