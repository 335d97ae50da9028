"""Interface between a policy process and its learner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import UpdateRequest
from embodyrl.envs.settings import EnvSettings
from embodyrl.learners.training import Trainer, UpdateGenerator
from embodyrl.policies.protocol import Policy
from embodyrl.types import EnvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """Arguments of a learner's constructor."""

    trainer: Trainer
    """Trainer with the policy and its optimizer."""
    arena: Arena
    algorithm: Algorithm | None
    """Policy-gradient or off-policy algorithm; None: SFT."""
    objective: Any = None
    """Settings of the SFT objective."""
    seed: int
    env: EnvSpec
    goal_env: EnvSettings | None = None
    """Settings of the environment that computes rewards for relabeled goals; None: the algorithm relabels no goals."""
    reference: Policy | None = None
    """Frozen reference policy; None: the algorithm does not need a reference."""


class Learner(Protocol):
    """Base class of learners, which update a policy in one actor rank.

    The attribute `learner` of an advantage estimator or an SFT objective names the class, which is called with a
    `LearnerContext`. Methods that a subclass does not override do nothing.
    """

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        """Train on the records of one training step, yielding after each micro-batch; return metrics.

        The records contain observations, actions and advantages; the arena reuses them after this method returns.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the learner's own state into a checkpoint folder. All ranks call this method; the first rank writes."""

    def load(self, folder: Path) -> None:
        """Load the files written by `save`."""

    def close(self) -> None:
        """Free resources; idempotent."""
