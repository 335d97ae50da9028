"""Algorithm entry of soft actor-critic (SAC, RLPD), its config keys, and those of all algorithms with critics."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, EstimatorInputs
from embodyrl.algorithms.settings import BufferSettings, DiscountSettings
from embodyrl.config.settings import Count, Index, Positive
from embodyrl.types import Episode


class CriticSettings(BufferSettings, DiscountSettings):
    """Config keys for algorithms whose critics train on transitions of a replay buffer (SAC, RLPD, TD3+BC)."""

    transitions = True
    n_step: Count = 1
    """Number of chunks whose rewards are summed before the bootstrapped value (n-step return)."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Polyak coefficient of the target critics, per update."""
    critics: Annotated[int, Field(ge=2, le=100)] = 2
    """Number of critics.
    With more than two (REDQ), the target is the minimum of critics_in_target random critics, and the policy uses the
    mean of all."""
    critics_in_target: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of random critics whose minimum is the bootstrapped value; 1: no minimum, for sparse rewards (RLPD)."""
    critic_warmup: Index = 0
    """Number of initial training steps that update only the critics, for a policy that starts from SFT or a base
    policy. Steps before learning_starts count."""
    policy_interval: Count = 1
    """Number of critic updates per update of the policy and the temperature."""
    critic_layer_norm: bool = False
    """Layer normalization in the critics, which limits overestimation for unseen actions (RLPD)."""

    def problems(self) -> Iterator[str]:
        """Yield one error per contradiction between settings."""
        yield from super().problems()
        if self.critics_in_target > self.critics:
            yield (
                f"algorithm.critics_in_target={self.critics_in_target} exceeds algorithm.critics={self.critics}. "
                f"Use algorithm.critics_in_target={self.critics} or more critics."
            )


class ReplaySettings(CriticSettings):
    """Config keys of soft actor-critic (SAC, RLPD)."""

    backup_entropy: bool = True
    """Include the entropy of the next action in the target of the critics; RLPD excludes the entropy if rewards are
    sparse."""
    alpha_init: Positive = 1.0
    """Initial temperature (entropy coefficient); training adapts the temperature."""
    target_entropy: Annotated[float, Field(ge=-(10**6), le=10**6)] | None = None
    """Target entropy of a chunk in nats; default: minus the number of action dimensions."""
    image_shift: Annotated[int, Field(ge=0, le=64)] = 4
    """Maximum shift of camera images in pixels, for random-shift augmentation of each update; 0: no augmentation."""
    hindsight_goals: Index = 0
    """Number of relabeled transitions per original transition in goal environments (HER, strategy `future`).
    Goals are states reached later in the same episode. The paper uses 4. 0: no relabeling."""

    @property
    def needs_terminal_observations(self) -> bool:
        """True if the final observation of terminated episodes is stored, as an achieved goal."""
        return self.hindsight_goals > 0


def compute_sac_credits(episodes: Sequence[Episode], _: EstimatorInputs, _cfg: CriticSettings) -> list[Credit]:
    """Return the rewards in place of advantages, because the replay buffer stores rewards."""
    return [Credit(advantage=e.reward, returns=np.zeros_like(e.value)) for e in episodes]


SAC = AdvantageEstimator(
    compute=compute_sac_credits,
    settings=ReplaySettings,
    counts_chunk_steps=True,
    learner="embodyrl.learners.off_policy.sac_learner:SacLearner",
    check="embodyrl.plan.off_policy:replay_problems",
)
