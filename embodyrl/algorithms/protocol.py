"""The algorithm seam: advantages (numpy, in the driver) and losses (torch, in the actor), both pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.registry import Registry
from embodyrl.types import BoolArray, Episode, FloatArray, IntArray, PolicyScores, PreparedBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the actors and the arena add to finished episodes, aligned with them; only what the algorithm asks for."""

    logprob: tuple[FloatArray, ...] = ()
    """[T, L] of the policy that acted."""
    ref_logprob: tuple[FloatArray, ...] = ()
    """[T, L] of the reference policy."""
    states: tuple[IntArray, ...] = ()
    """[T] hash of the observation before each chunk."""
    greedy: tuple[Episode | None, ...] = ()
    """The greedy episode of each one's group; None: lost to a crash."""
    part_weights: tuple[float, ...] = ()
    """[C] weight of each part of the reward, `EnvSpec.component_weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Weights of n samples over one whole optimizer step, all ranks, so that micro-batch losses add up to the global
    aggregate whatever the split.
    """

    policy: FloatArray
    """[n, K] weight of each action in the policy loss; sums to 1 for the mean modes of `loss_agg_func`."""
    value: FloatArray
    """[n, V] weight of each value target; sums to 1."""
    positive: FloatArray
    """[n, K] weight of each action with a positive advantage; sums to 1, or all 0."""

    def rows(self, index: IntArray | slice) -> LossWeights:
        """Return the weights of some of the samples."""
        return LossWeights(policy=self.policy[index], value=self.value[index], positive=self.positive[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch of chunk samples (torch, fp32, on the actor's device)."""

    old_logprob: torch.Tensor
    """[B, L] of the policy in the ratio's denominator."""
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
    """[B, K] `LossWeights.policy`."""
    value_weight: torch.Tensor
    """[B, V] `LossWeights.value`."""
    positive_weight: torch.Tensor
    """[B, K] `LossWeights.positive`."""
    correction: torch.Tensor | None = None
    """Factors of `Algorithm.correct`; None: no correction."""


class Algorithm(Protocol):
    """An advantage estimator and a loss, bound to one config."""

    needs_groups: bool
    """Members of a group must share a reset id, and the group size must exceed 1."""
    needs_values: bool
    counts_chunk_steps: bool
    """The quota of a step is chunk steps per slot (episodes are cut and bootstrapped), not a list of episodes."""
    needs_reference: bool
    needs_states: bool
    """`Scores.states`."""
    needs_greedy: bool
    """`Scores.greedy`."""
    needs_reference_in_prepare: bool
    """`Scores.logprob` and `Scores.ref_logprob`."""
    recomputes_logprob: bool
    """The actor scores the batch with its own weights before it trains; those are the ratio's denominator."""

    def state(self) -> dict[str, float]:
        """Return what changes from step to step, for a checkpoint of the loop."""
        ...

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        ...

    def select(self, episodes: Sequence[Episode]) -> list[int]:
        """Return the indices of the episodes that may enter the update."""
        ...

    def prepare(self, episodes: Sequence[Episode], scores: Scores) -> PreparedBatch:
        """Turn finished episodes into advantages and value targets.

        Raises:
            NonFiniteError: a reward, value or advantage is not finite; names the episode.
        """
        ...

    def weights(self, batch: PreparedBatch, samples: Sequence[int]) -> LossWeights:
        """Return the weights of the samples of one optimizer step, all ranks."""
        ...

    def correct(
        self, proximal: torch.Tensor, behaviour: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Compare the recomputed log-probabilities with those of the policies that acted, over the whole batch.

        Args:
            proximal: [B, L]
            behaviour: [B, L]
            valid: [B, K] bool.

        Returns:
            Factors without gradient on the policy loss of each unit, [B, K, D], [B, K, 1] or [B, 1, 1] by
            `logprob_type`, or None; and metrics.
        """
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

    compute: Callable[[Sequence[Episode], Scores, AlgorithmConfig], list[Credit]]
    """Credits aligned with the episodes of one training step."""
    consumes: frozenset[str]
    """Keys below `algorithm` that this estimator reads besides the common ones."""
    ignores: frozenset[str] = frozenset()
    """Common keys that it does not read."""
    needs_groups: bool = False
    needs_values: bool = False
    counts_chunk_steps: bool = False
    needs_states: bool = False
    needs_greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What carries one probability ratio (`logprob_type`): tokens [B, K, D], actions [B, K, 1] or chunks [B, 1, 1]."""

    logprob: torch.Tensor
    """0 where not valid, as `old_logprob`."""
    old_logprob: torch.Tensor
    advantage: torch.Tensor
    """[B, K, 1] or [B, 1, 1]; broadcasts over the last axis."""
    valid: torch.Tensor
    """bool, shape of `advantage`."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean [B, 1, 1] of `values` over the valid units of each sample."""
        mask = self.valid.expand_as(self.logprob)
        total = values.expand_as(mask).where(mask, values.new_zeros(())).sum((1, 2), keepdim=True)
        return total / mask.sum((1, 2), keepdim=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A policy loss before aggregation; tensors have the shape of the log-probabilities given."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Probability ratio new / old."""
    clipped: torch.Tensor
    """bool, the clip removed the gradient of this entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What `loss_type` names."""

    compute: Callable[[Units, AlgorithmConfig], LossTerms]
    """Loss of each unit; sequence-level methods take a sample's units for the sequence."""
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
