"""Noise of flows: a counter-based function of the uniform numbers that the run draws for an episode's chunk.

One chunk needs many more normal numbers than tokens are kept of it, and some of them again while training. They come
from a seed of 48 bits that the run's own numbers spell, by Philox (Salmon et al. 2011): nothing depends on batches.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.transfer import on_device
from embodyrl.types import FloatArray, IntArray

START, PLACE, PAIRS, TIMES, STEP = range(5)
"""Streams of a seed: first state, stochastic step, noise and times of FPO's pairs, noise of step i (STEP + i)."""


def seeds_of(noise: FloatArray) -> IntArray:
    """Seeds [B] of 48 bits, from the first two of uniforms [B, L >= 2] in [0, 1) with 24 bits each."""
    bits = (noise[:, :2].astype(np.float64) * 2**24).astype(np.int64)
    return bits[:, 0] << 24 | bits[:, 1]


def uniforms(seeds: IntArray, stream: int, count: int) -> np.ndarray:
    """[B, count] float64 strictly between 0 and 1."""
    philox = np.random.Philox(key=0)
    state = cast(Any, philox.state)
    out = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        state["state"]["key"][:] = seed, stream
        philox.state = state
        # The raw numbers, which no version of numpy may change.
        out[row] = (philox.random_raw(count) >> np.uint64(11)).astype(np.float64)
    return (out + 0.5) * 2.0**-53


def normals(seeds: IntArray, stream: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers [B, *shape], float32; the same on every device."""
    flat = uniforms(seeds, stream, int(np.prod(shape)))
    return on_device(torch.special.ndtri(torch.from_numpy(flat)).float(), device).unflatten(1, shape)
