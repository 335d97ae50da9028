"""Between action values, bins and token ids (float64 inside, as the public code)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embodyrl.policies.openvla_oft.config import ActionStatistics
from embodyrl.types import FloatArray, IntArray


class ActionTokenizer:
    """Uniform bins over -1..1; the highest value has the lowest id.

    `encode`: id = Vd - digitize(clip(a, -1, 1), edges) with `n_bins` edges; `decode` gives the centre of the bin. The
    two lowest ids share one centre, because n_bins edges enclose n_bins - 1 bins.
    """

    def __init__(self, *, vocab_end: int, n_bins: int) -> None:
        self.vocab_end = vocab_end
        self.n_bins = n_bins
        self._edges = np.linspace(-1.0, 1.0, n_bins)
        self._centres = (self._edges[:-1] + self._edges[1:]) / 2.0

    def encode(self, normalised: npt.ArrayLike) -> IntArray:
        """Token ids of normalised actions; values outside -1..1 are clipped."""
        clipped = np.clip(np.asarray(normalised, dtype=np.float64), -1.0, 1.0)
        return (self.vocab_end - np.digitize(clipped, self._edges)).astype(np.int64)

    def decode(self, ids: IntArray) -> npt.NDArray[np.float64]:
        """Bin centres in -1..1 of token ids; ids outside the range are clipped to it."""
        return self._centres[np.clip(self.vocab_end - ids - 1, 0, len(self._centres) - 1)]


def unnormalise(normalised: npt.NDArray[np.float64], statistics: ActionStatistics) -> FloatArray:
    """Map actions [..., A] from -1..1 to the units of the training data (BOUNDS_Q99); masked ones stay."""
    low, high = np.asarray(statistics.q01), np.asarray(statistics.q99)
    scaled = 0.5 * (normalised + 1.0) * (high - low + 1e-8) + low
    return np.where(statistics.mask, scaled, normalised).astype(np.float32)


def normalise(actions: npt.ArrayLike, statistics: ActionStatistics) -> npt.NDArray[np.float64]:
    """Map actions [..., A] of the training data to -1..1, the inverse of `unnormalise`; used to make SFT targets."""
    low, high = np.asarray(statistics.q01), np.asarray(statistics.q99)
    raw = np.asarray(actions, dtype=np.float64)
    scaled = np.clip(2.0 * (raw - low) / (high - low + 1e-8) - 1.0, -1.0, 1.0)
    return np.where(statistics.mask, np.where(low == high, 0.0, scaled), raw)
