"""Interface between the policy host and the learner of an algorithm."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import UpdateRequest
from embodyrl.envs.settings import EnvSettings
from embodyrl.learners.settings import ActorSettings
from embodyrl.learners.training import InParts, Trainer
from embodyrl.policies.protocol import Policy
from embodyrl.types import EnvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """Arguments of a learner."""

    trainer: Trainer
    """Trainer of the policy; the policy acts in this process or in other processes."""
    arena: Arena
    algorithm: Algorithm | None
    """Policy-gradient or off-policy algorithm; None for SFT."""
    actor: ActorSettings
    objective: Any = None
    """Settings of the SFT objective."""
    seed: int
    env: EnvSpec
    judge: EnvSettings | None = None
    """Environment that computes the rewards of relabelled goals, if the algorithm needs such rewards."""
    reference: Policy | None = None
    """Reference policy, if the algorithm needs it."""


class Learner(Protocol):
    """Base class of the update of a policy in one actor rank.

    `AdvantageEstimator.learner` or `learner` of an objective is the name of a class that is called with a
    `LearnerContext`. Methods that a subclass does not override do nothing.
    """

    def update(self, request: UpdateRequest) -> InParts[dict[str, float]]:
        """Train on the records of one training step, yielding after each micro-batch; return metrics.

        The records contain observations, actions and credits; they are reused after this method returns.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write additional state of a checkpoint; all ranks call this method, the first rank writes."""

    def load(self, folder: Path) -> None:
        """Load the files written by `save`."""

    def close(self) -> None:
        """Free resources; idempotent."""
