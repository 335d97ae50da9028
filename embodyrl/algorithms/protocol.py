"""Interfaces of advantage estimators (numpy, in the driver) and policy losses (torch, in the actor)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from embodyrl import parts
from embodyrl.algorithms.settings import AlgorithmSettings, BufferSettings, GroupSettings, ValueSettings
from embodyrl.config.settings import Settings
from embodyrl.registry import Registry
from embodyrl.types import Episode, FloatArray, IntArray

if TYPE_CHECKING:
    import torch

A = TypeVar("A", bound=AlgorithmSettings)
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """Inputs of an advantage estimator in addition to the episodes.

    Tuples contain one entry per episode, in the same order, except `part_weights`. Tuples that the estimator does not
    need are empty.
    """

    logprob: tuple[FloatArray, ...] = ()
    """[T, L] log-probabilities of each episode's tokens under the behavior policy."""
    ref_logprob: tuple[FloatArray, ...] = ()
    """[T, L] log-probabilities of each episode's tokens under the reference policy."""
    states: tuple[IntArray, ...] = ()
    """For each episode, hashes [T] of the observations before its T chunks."""
    greedy: tuple[Episode | None, ...] = ()
    """Greedy episode of each episode's group; None: the greedy episode was lost in a worker crash."""
    part_weights: tuple[float, ...] = ()
    """Weights of the C reward components (`RewardSpec.weights`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Loss weights of n samples, normalized over one optimizer step of all ranks.

    Losses of micro-batches add up to the same total loss for every split into micro-batches.
    """

    policy: FloatArray
    """[n, K] weight of each action in the policy loss; sums to 1 for the mean modes of `loss_agg_func`."""
    value: FloatArray
    """[n, V] weight of each value target; sums to 1."""
    positive: FloatArray
    """[n, K] weight of each action with a positive advantage; sums to 1, or all 0."""

    def rows(self, index: IntArray) -> LossWeights:
        """Return the weights of the selected samples."""
        policy, value, positive = (own.take(index, 0) for own in (self.policy, self.value, self.positive))
        return LossWeights(policy=policy, value=value, positive=positive)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of the loss for a micro-batch of B chunk samples (torch, fp32, on the actor's device)."""

    old_logprob: torch.Tensor
    """[B, L] log-probabilities of the policy in the ratio's denominator."""
    ref_logprob: torch.Tensor | None
    """[B, L] log-probabilities of the reference; None without a KL term."""
    advantage: torch.Tensor
    """[B, K] advantage of each action."""
    returns: torch.Tensor
    """[B, V] value targets."""
    old_value: torch.Tensor
    """[B, V] values predicted during the rollout."""
    valid: torch.Tensor
    """[B, K] bool, True for executed actions."""
    weight: torch.Tensor
    """[B, K] weight of each action in the policy loss (`LossWeights.policy`)."""
    value_weight: torch.Tensor
    """[B, V] weight of each value target (`LossWeights.value`)."""
    positive_weight: torch.Tensor
    """[B, K] weight of each action with a positive advantage (`LossWeights.positive`)."""
    behavior_logprob: torch.Tensor | None = None
    """[B, L] log-probabilities of the behavior policy; None: `old_logprob`."""
    correction: torch.Tensor | None = None
    """Off-policy correction factors from `Algorithm.correct`; None: no correction."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors [B, ...] that are not None, by field name."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """Detached values from which the metrics of a micro-batch of B samples are computed."""

    rows: Mapping[str, torch.Tensor]
    """[B, ...] values of each sample, by name."""
    sums: Mapping[str, torch.Tensor]
    """Scalars that are summed over micro-batches, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages and value targets of one episode."""

    advantage: FloatArray
    """[T, K] advantage of each action; entries of actions that were not executed are ignored."""
    returns: FloatArray
    """[T, V] value targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator(Generic[A]):
    """Advantage estimator that `adv_type` selects: its function, settings class and requirements."""

    compute: Callable[[Sequence[Episode], EstimatorInputs, A], list[Credit]]
    """Function that returns the credits of the episodes of one training step, in the same order."""
    settings: type[A] = AlgorithmSettings  # pyright: ignore[reportAssignmentType]  # for estimators without own keys
    """Settings class of the estimator's keys under `algorithm`; `compute` receives an instance."""
    counts_chunk_steps: bool = False
    """True if rollouts collect a fixed number of chunk steps per environment, which may interrupt episodes."""
    needs_states: bool = False
    """True if `compute` needs observation hashes (`EstimatorInputs.states`)."""
    needs_greedy: bool = False
    """True if `compute` needs a greedy episode per group (`EstimatorInputs.greedy`)."""
    learner: str = "embodyrl.learners.policy_gradient:PolicyGradientLearner"
    """Learner class as package.module:class (see `learners/protocol.py`). Settings of a learner without a `loss_type`
    are subclasses of `BufferSettings`."""
    check: str = ""
    """Import path (package.module:function) of a check of the run; empty: no check. The function takes Config,
    Algorithm, EnvSpec and PolicySpec, and returns errors, one line each."""

    @property
    def needs_groups(self) -> bool:
        """True if the members of a group must share a reset id and the group size must exceed 1."""
        return issubclass(self.settings, GroupSettings)

    @property
    def needs_values(self) -> bool:
        """True if the policy needs a value head."""
        return issubclass(self.settings, ValueSettings)

    @property
    def needs_replay(self) -> bool:
        """True if transitions are stored in a replay buffer; the learner then has its own update and no `loss_type`."""
        return issubclass(self.settings, BufferSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossUnits:
    """Inputs of a policy loss per unit: tokens [B, K, D], actions [B, K, 1] or chunks [B, 1, 1] (`logprob_type`)."""

    logprob: torch.Tensor
    """Log-probabilities of the units under the trained policy; 0 where not valid."""
    old_logprob: torch.Tensor
    advantage: torch.Tensor
    """[B, K, 1] or [B, 1, 1] advantages, which broadcast over tokens."""
    valid: torch.Tensor
    """Mask of valid units, bool, with the shape of `advantage`."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean [B, 1, 1] of `values` over the valid units of each sample."""
        # `valid` has one entry for all tokens of an action.
        mask = self.valid.expand_as(self.logprob)
        total = values.expand_as(mask).where(mask, values.new_zeros(())).sum((1, 2), keepdim=True)
        return total / mask.sum((1, 2), keepdim=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Policy loss of each unit before aggregation; all tensors have the shape of `LossUnits.logprob`."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Probability ratio new / old."""
    clipped: torch.Tensor
    """bool, True where clipping removed the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Generic[S]):
    """Policy loss that `loss_type` selects: its function, settings class and requirements."""

    compute: Callable[[LossUnits, S], LossTerms]
    """Function that returns the loss of each unit; sequence-level methods treat each sample as one sequence."""
    settings: type[S] = Settings  # pyright: ignore[reportAssignmentType]  # for losses without own keys
    """Settings class of the loss's own keys, which are set under `algorithm`; `compute` receives an instance."""
    needs_all_samples: bool = False
    """True if samples with advantage 0 must be kept, for losses with batch statistics or with a term that does not
    depend on the advantage."""


ADVANTAGES: Registry[AdvantageEstimator[Any]] = Registry(
    "adv_type",
    group="embodyrl.advantages",
    parts=parts.ADVANTAGES,
    wants="an AdvantageEstimator",
    fits=lambda value: isinstance(value, AdvantageEstimator),
)
LOSSES: Registry[PolicyLoss[Any]] = Registry(
    "loss_type",
    group="embodyrl.losses",
    parts=parts.LOSSES,
    wants="a PolicyLoss",
    fits=lambda value: isinstance(value, PolicyLoss),
)
