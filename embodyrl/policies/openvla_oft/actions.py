"""Between action values, bins and token ids (float64 inside, as the public code)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embodyrl.types import IntArray


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
