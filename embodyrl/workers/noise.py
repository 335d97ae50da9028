"""Action noise as a pure function of (episode, chunk, token), independent of batches, workers and arrival order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from embodyrl.types import FloatArray


def token_noise(keys: Sequence[tuple[int, int]], tokens_per_chunk: int) -> FloatArray:
    """Return uniforms [B, L] in [0, 1) for (noise seed of the episode, chunk index) pairs.

    Philox is counter-based (Salmon et al. 2011): the episode is the key and the chunk the counter, so any chunk's
    noise can be drawn without drawing the ones before it.
    """
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), cast(Any, philox.state)
    noise = np.empty((len(keys), tokens_per_chunk), dtype=np.float32)
    for row, (seed, chunk) in enumerate(keys):
        # A new Philox asks the system for entropy that nobody uses, which takes longer than all the rest.
        state["state"]["key"][0], state["state"]["counter"][3] = seed, chunk
        philox.state = state
        noise[row] = generator.random(tokens_per_chunk, dtype=np.float32)
    return noise
