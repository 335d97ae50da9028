"""`adv_type: grpo`: episodes of one group, that is of one reset id, are each other's baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from embodyrl.algorithms.advantages import grpo
from embodyrl.algorithms.protocol import AdvantageEstimator, Credit
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.types import Episode


def grpo_credits(episodes: Sequence[Episode], cfg: AlgorithmConfig) -> list[Credit]:
    """Spread the group-relative advantage of each episode's undiscounted return over all its actions.

    An episode whose group was lost to crashed env workers has nobody to be compared with: its advantage is 0.
    """
    groups = [episode.spec.group_id for episode in episodes]
    sizes = Counter(groups)
    advantage = grpo([episode.episode_return for episode in episodes], groups, normalize=cfg.normalize_advantages)
    advantage[[sizes[group] == 1 for group in groups]] = 0.0
    return [
        Credit(
            advantage=np.where(episode.valid, one, 0.0).astype(np.float32),
            returns=np.zeros((len(episode.valid), 0), dtype=np.float32),
        )
        for episode, one in zip(episodes, advantage, strict=True)
    ]


GRPO = AdvantageEstimator(
    compute=grpo_credits,
    consumes=frozenset({"normalize_advantages"}),
    needs_groups=True,
    needs_values=False,
    counts_chunk_steps=False,
)
