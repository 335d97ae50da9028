"""Algorithm entry of soft actor-critic (SAC, RLPD), and its config keys."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import BufferSettings, DiscountSettings
from embodyrl.config.settings import Count, Index, Positive
from embodyrl.types import Episode


class ReplaySettings(BufferSettings, DiscountSettings):
    """Config keys for algorithms whose critics train on a replay buffer (SAC, RLPD)."""

    transitions = True
    n_step: Count = 1
    """Number of chunks whose rewards are summed before the bootstrapped value (n-step return)."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Polyak coefficient of the target critics, per update."""
    critics: Annotated[int, Field(ge=2, le=100)] = 2
    """Number of critics.
    With more than two (REDQ), the target is the minimum of two sampled critics, the policy uses the mean."""
    policy_interval: Count = 1
    """Number of critic updates per update of policy and temperature."""
    critic_layer_norm: bool = False
    """Layer normalisation in the critics, which limits overestimation for unseen actions (RLPD)."""
    alpha_init: Positive = 1.0
    """Initial temperature (entropy coefficient); training adapts the temperature."""
    target_entropy: Annotated[float, Field(ge=-(10**6), le=10**6)] | None = None
    """Target entropy of a chunk in nat; default: minus the number of action dimensions."""
    image_shift: Annotated[int, Field(ge=0, le=64)] = 4
    """Policies with cameras: maximum random shift of images in an update, in pixels (random-shift augmentation); 0:
    none."""
    hindsight_goals: Index = 0
    """Goal environments: relabelled copies of each sampled transition, with goals reached later in its episode (HER,
    `future`); 4 in the paper. 0: none."""

    @property
    def method(self) -> str:
        """Return a one-line description of the algorithm."""
        return super().method + (f", {self.hindsight_goals} goals in hindsight" if self.hindsight_goals else "")

    @property
    def needs_all_ends(self) -> bool:
        """Return whether the final observation of terminated episodes is also stored, as an achieved goal."""
        return self.hindsight_goals > 0


def sac_credits(episodes: Sequence[Episode], _: Scores, cfg: ReplaySettings) -> list[Credit]:
    """Return the reward of each action in place of an advantage; the replay buffer stores these rewards."""
    del cfg
    return [Credit(advantage=e.reward, returns=np.zeros_like(e.value)) for e in episodes]


SAC = AdvantageEstimator(
    compute=sac_credits,
    settings=ReplaySettings,
    counts_chunk_steps=True,
    learner="embodyrl.extensions.off_policy.sac_learner:SacLearner",
    check="embodyrl.extensions.off_policy.plan:replay_problems",
)
