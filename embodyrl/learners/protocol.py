"""The seam between the policy host and what carries out an algorithm's updates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import UpdateRequest
from embodyrl.envs.settings import EnvSettings
from embodyrl.learners.settings import ActorSettings, ObjectiveSettings
from embodyrl.learners.training import InParts, Trainer
from embodyrl.policies.protocol import Policy
from embodyrl.types import EnvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """What a learner is built of."""

    trainer: Trainer
    """Of the policy, which acts in the same process or in others."""
    arena: Arena
    algorithm: Algorithm | None
    """None: SFT."""
    actor: ActorSettings
    objective: ObjectiveSettings | None = None
    """Objective of SFT."""
    seed: int
    env: EnvSpec
    judge: EnvSettings | None = None
    """The environment that says what other goals would have earned, where the algorithm asks."""
    reference: Policy | None = None
    """Where the algorithm asks for one."""


class Learner(Protocol):
    """Update of a policy in one actor rank.

    `AdvantageEstimator.learner` or `ObjectiveSettings.learner` is the name of a class that is called with a
    `LearnerContext`. A subclass of this one inherits the methods that do nothing.
    """

    def update(self, request: UpdateRequest) -> InParts[dict[str, float]]:
        """Learn from the records of one training step, pausing after each micro-batch; returns metrics.

        The records hold what was seen and done, and the credits; they belong to others once this has returned.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what a checkpoint needs beside policy and optimizer; all ranks are called, the first one writes."""

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""

    def close(self) -> None:
        """Free what does not free itself; idempotent."""
