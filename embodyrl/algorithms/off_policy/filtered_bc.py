"""Filtered behavior cloning: train on the actions of episodes with a high return.

This method is also known as rejection-sampling fine-tuning or self-imitation. With rewards of 0 and 1 and without the
buffer, the expected update equals that of REINFORCE without a baseline. The method needs no likelihood, so any policy
with an SFT loss can be trained.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, EstimatorInputs
from embodyrl.algorithms.settings import BufferSettings
from embodyrl.types import Episode


class SelectionSettings(BufferSettings):
    """Config keys for algorithms that imitate episodes with a high return."""

    imitate_above: Annotated[float, Field(ge=-(10**9), le=10**9)] = 0.0
    """Episodes with a return above this value (after algorithm.reward_scale) are imitated.
    With success rewards of 0 and 1, the default 0 selects successful episodes."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the exponential moving average (EMA) of the weights; rollouts and checkpoints use the averaged weights.
    0: no averaging."""


class FilteredSettings(SelectionSettings):
    """Settings of filtered behavior cloning."""

    imitates = True


def compute_filtered_credits(episodes: Sequence[Episode], _: EstimatorInputs, cfg: FilteredSettings) -> list[Credit]:
    """Return advantage 1 for all actions of episodes with a return above `imitate_above`, else 0."""
    return [
        Credit(
            advantage=np.full(e.reward.shape, e.episode_return > cfg.imitate_above, np.float32),
            returns=np.zeros_like(e.value),
        )
        for e in episodes
    ]


FILTERED_BC = AdvantageEstimator(
    compute=compute_filtered_credits,
    settings=FilteredSettings,
    learner="embodyrl.learners.off_policy.filtered_bc_learner:FilteredLearner",
    check="embodyrl.plan.off_policy:replay_problems",
)
