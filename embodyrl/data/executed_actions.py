"""Executed actions of demonstrations: the expert's recorded actions plus the noise added during the collection."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodyrl.data.layout import OWN, Card
from embodyrl.envs.chunked import add_noise
from embodyrl.types import FloatArray


def get_executed_actions(card: Card, episodes: Sequence[Mapping[str, Any]], labels: FloatArray) -> FloatArray:
    """Return the executed actions [N, A] of episodes whose recorded actions are `labels` [N, A].

    With `model.expert_noise`, the labels have no noise. The noise depends only on the seed of the episode and the step.
    """
    scale = card.collected.get("expert_noise")
    if not scale:
        return labels
    seeds_and_steps = [(int(episode[f"{OWN}seed"]), step) for episode in episodes for step in range(episode["length"])]
    spec = card.env.action
    steps = zip(labels, seeds_and_steps, strict=True)
    return np.stack([add_noise(spec, label, seed, step, scale) for label, (seed, step) in steps])
