"""Policy features of the frames of data sets, which are the inputs of the critics."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from embodyrl.data.reader import Demonstrations
from embodyrl.policies.protocol import Policy
from embodyrl.types import ROWS_AT_A_TIME, IntArray, Observation


@runtime_checkable
class HasFeatures(Policy, Protocol):
    """Interface of a policy that computes features of observations as inputs of critics."""

    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F] of observations, without gradients."""
        ...


def compute_features(policy: HasFeatures, demos: Demonstrations) -> Tensor:
    """Return the policy's features of all frames, concatenated with the state: [N, F]."""
    parts: list[Tensor] = []
    for start in range(0, len(demos.action), ROWS_AT_A_TIME):
        obs = observations(demos, np.arange(start, min(start + ROWS_AT_A_TIME, len(demos.action))))
        features = policy.features(obs).float()
        parts.append(torch.cat([features, torch.from_numpy(obs.state).to(features)], 1))
    return torch.cat(parts)


def observations(demos: Demonstrations, frames: IntArray) -> Observation:
    """Return the observations of the frames with the indices `frames`."""
    instructions = tuple(str(text) for text in demos.instruction[frames])
    return Observation(images=demos.images[frames], state=demos.state[frames], instructions=instructions)
