"""Filtered behaviour cloning: the policy imitates what it did in episodes that earned enough.

Also known as rejection-sampling fine-tuning, or self-imitation; for rewards of 0 and 1 and without the buffer the
expected update is that of REINFORCE without a baseline. It needs no likelihood, so any policy that imitates learns.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from embodyrl.algorithms.protocol import AdvantageEstimator, Credit, Scores
from embodyrl.algorithms.settings import BufferSettings
from embodyrl.types import Episode


class FilteredSettings(BufferSettings):
    """Which episodes are imitated."""

    imitates = True
    imitate_above: Annotated[float, Field(ge=-(10**9), le=10**9)] = 0.0
    """Episodes whose return (after algorithm.reward_scale) is larger are imitated; of success as the reward: the
    successful ones."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The policy that acts and is saved is an exponential moving average of the trained weights, of which so much stays
    at each update: the noise of a learning rate like that of `sft` would cost success. 0: the weights themselves."""


def filtered_credits(episodes: Sequence[Episode], _: Scores, cfg: FilteredSettings) -> list[Credit]:
    """All actions of an episode that earned enough get 1, of others 0."""
    return [
        Credit(
            advantage=np.full(e.reward.shape, e.episode_return > cfg.imitate_above, np.float32),
            returns=np.zeros_like(e.value),
        )
        for e in episodes
    ]


FILTERED_BC = AdvantageEstimator(
    compute=filtered_credits, settings=FilteredSettings, learner="embodyrl.learners.filtered_bc:FilteredLearner"
)
