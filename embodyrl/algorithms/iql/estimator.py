"""Config keys and registered estimator of implicit Q-learning (IQL; Kostrikov et al., arXiv 2110.06169)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, EstimatorInputs
from embodyrl.algorithms.settings import BufferSettings, DiscountSettings
from embodyrl.config.settings import Count, Weight
from embodyrl.types import Episode


class IqlSettings(BufferSettings, DiscountSettings):
    """Config keys of implicit Q-learning."""

    keys_by_condition = {
        "never: algorithm=iql trains on algorithm.demonstrations only": "replay_size save_replay learning_starts "
        "demonstration_share",
    }
    transitions = True
    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Expectile of the Q values that the value network predicts; 0.5 is the mean, values near 1 approach the maximum
    within the data."""
    temperature: Weight = 3.0
    """Inverse temperature of the advantage weights exp(temperature * advantage); 0: behavior cloning."""
    weight_clip: Annotated[float, Field(ge=1, le=10**6)] = 100.0
    """Maximum advantage weight of a sample; larger weights are clipped."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Polyak coefficient of the target critics, per update."""
    critic_width: Count = 256
    """Width of the two hidden layers of the critics and the value network."""


def compute_zero_credits(episodes: Sequence[Episode], _: EstimatorInputs, _cfg: IqlSettings) -> list[Credit]:
    """Return zero advantages, because training does not use the policy's own episodes."""
    return [Credit(advantage=np.zeros_like(e.reward), returns=np.zeros_like(e.value)) for e in episodes]


IQL = AdvantageEstimator(
    compute=compute_zero_credits,
    settings=IqlSettings,
    counts_chunk_steps=True,
    learner="embodyrl.learners.iql.learner:IqlLearner",
    check="embodyrl.plan.off_policy:iql_problems",
)
