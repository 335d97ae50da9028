"""Statistics of training data: between the units of actions and proprioception and -1..1; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError
from embodyrl.registry import closest
from embodyrl.types import FloatArray, IntArray

STATISTICS_FILE = "dataset_statistics.json"
NORMALISATIONS = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}
"""Names of `model.action_normalization` and the fields that bound -1..1: LIBERO and Bridge use q99, ALOHA min/max."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What -1 and 1 stand for, per dimension; where `mask` is false a dimension is not normalised."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The data sets of `dataset_statistics.json` (or of config.json's `norm_stats`) by name."""

    sets: Mapping[str, Any]
    folder: Path

    def find(self, *keys: str | None) -> str:
        """Return the data set that the first given key names (`<key>_no_noops` also counts), or else the only one.

        Raises:
            CheckpointError: neither the key nor `<key>_no_noops` exists.
        """
        wanted = next((key for key in keys if key), None)
        if wanted is None and len(self.sets) == 1:
            return next(iter(self.sets))
        known = ", ".join(sorted(self.sets))
        if wanted is None:
            raise CheckpointError(
                f"model.unnorm_key is not set and the environment names no data set. Statistics in "
                f"{self.folder}: {known}. Set model.unnorm_key to the one the checkpoint was trained with."
            )
        for key in (wanted, f"{wanted}_no_noops"):
            if key in self.sets:
                return key
        raise CheckpointError(
            f"No action statistics '{wanted}' (nor '{wanted}_no_noops') in {self.folder}."
            f"{closest(wanted, self.sets)} Known: {known}. The checkpoint was probably trained on another "
            f"benchmark; set model.unnorm_key or model.path."
        )

    def bounds(self, data_set: str, part: str, normalisation: str) -> Bounds:
        """Read the bounds of `action` or `proprio`; a missing mask means that every dimension is normalised.

        Raises:
            CheckpointError: the data set lacks the part or its fields, or they are malformed.
        """
        low_name, high_name = NORMALISATIONS[normalisation]
        where = f"{self.folder / STATISTICS_FILE}: data set '{data_set}'"
        try:
            entry = self.sets[data_set][part]
            low, high = (tuple(map(float, entry[name])) for name in (low_name, high_name))
            mask = tuple(map(bool, entry.get("mask", [True] * len(low)))) if part == "action" else (True,) * len(low)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} has no usable {part} {low_name}/{high_name} ({error!r}). Fetch the file again, or check "
                f"model.action_normalization and model.use_proprio."
            ) from error
        if not len(low) == len(high) == len(mask):
            raise CheckpointError(f"{where} has {part} {low_name}, {high_name} and mask of different length.")
        return Bounds(low=low, high=high, mask=mask)


def unnormalise(normalised: npt.NDArray[np.floating], bounds: Bounds) -> FloatArray:
    """Map values [..., D] from -1..1 to the units of the training data; masked ones stay."""
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    # 1e-8 as in the public code, to the last bit, though here nothing is divided.
    scaled = 0.5 * (normalised + 1.0) * (high - low + 1e-8) + low
    return np.where(bounds.mask, scaled, normalised).astype(np.float32)


def normalise(values: npt.ArrayLike, bounds: Bounds, *, flat_to_zero: bool = True) -> npt.NDArray[np.float64]:
    """Map values [..., D] of the training data to -1..1 (clipped), the inverse of `unnormalise`; masked ones stay.

    `flat_to_zero`: dimensions whose bounds coincide become 0, as when training targets are made; the public inference
    code does not do so for proprioception.
    """
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    raw = np.asarray(values, dtype=np.float64)
    scaled = np.clip(2.0 * (raw - low) / (high - low + 1e-8) - 1.0, -1.0, 1.0)
    if flat_to_zero:
        scaled = np.where(low == high, 0.0, scaled)
    return np.where(bounds.mask, scaled, raw)


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
