"""Between the units of states and actions and what flow policies are trained on; imports nothing heavy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError
from embodyrl.types import FloatArray

STATISTICS_FILE = "norm_stats.json"
"""openpi's file: {"norm_stats": {"state": {"mean": [...], "std": ..., "q01": ..., "q99": ...}, "actions": ...}}."""
OPENPI_EPS, LEROBOT_EPS = 1e-6, 1e-8
"""lerobot adds its own to fewer of the denominators, which is 1e-8 of a difference where the spread is not zero."""
PARTS = ("state", "actions")
_LEROBOT_PARTS = {"observation.state": "state", "action": "actions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """normalised = (x - shift) / scale for the first D dimensions; further ones pass through."""

    shift: tuple[float, ...]
    scale: tuple[float, ...]

    def normalise(self, x: npt.ArrayLike) -> FloatArray:
        """Map [..., >= D] to the units of training."""
        out = np.array(x, np.float64)
        size = len(self.shift)
        out[..., :size] = (out[..., :size] - np.asarray(self.shift)) / np.asarray(self.scale)
        return out.astype(np.float32)

    def unnormalise(self, x: npt.ArrayLike) -> FloatArray:
        """The inverse."""
        out = np.array(x, np.float64)
        size = len(self.shift)
        out[..., :size] = out[..., :size] * np.asarray(self.scale) + np.asarray(self.shift)
        return out.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatistics:
    """Numbers per dimension of a data set's states or actions: mean and std, q01 and q99, or all four."""

    numbers: Mapping[str, tuple[float, ...]]
    where: str

    def mean_std(self, eps: float = OPENPI_EPS) -> Affine:
        """(x - mean) / (std + eps): pi0 and SmolVLA.

        Raises:
            CheckpointError: there are no mean and std.
        """
        mean, std = self._pair("mean", "std")
        return Affine(shift=mean, scale=tuple(s + eps for s in std))

    def quantiles(self, eps: float = OPENPI_EPS) -> Affine:
        """(x - q01) / (q99 - q01 + eps) * 2 - 1: pi0.5.

        Raises:
            CheckpointError: there are no q01 and q99.
        """
        low, high = self._pair("q01", "q99")
        half = tuple((b - a + eps) / 2 for a, b in zip(low, high, strict=True))
        return Affine(shift=tuple(a + h for a, h in zip(low, half, strict=True)), scale=half)

    def _pair(self, first: str, second: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        found = [self.numbers.get(name, ()) for name in (first, second)]
        if not found[0] or len(found[0]) != len(found[1]):
            raise CheckpointError(
                f"{self.where} has no usable {first} and {second}; only: {', '.join(sorted(self.numbers)) or 'none'}. "
                f"Fetch the file again, or choose the normalisation that the checkpoint was trained with."
            )
        return found[0], found[1]


def read_openpi(path: Path) -> dict[str, FlowStatistics]:
    """Read openpi's `norm_stats.json`: statistics of `state` and `actions`.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["norm_stats"]
        return {part: _statistics(content[part], f"{path}: {part}") for part in PARTS}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is missing or malformed ({error!r}). It holds the statistics of the training data; take it from "
            f"the checkpoint's assets."
        ) from error


def write_openpi(path: Path, statistics: Mapping[str, FlowStatistics]) -> None:
    """Write statistics in openpi's form."""
    content = {part: {name: list(row) for name, row in found.numbers.items()} for part, found in statistics.items()}
    path.write_text(json.dumps({"norm_stats": content}, indent=2) + "\n", encoding="utf-8")


def read_lerobot(tensors: Mapping[str, Any], where: Path) -> dict[str, FlowStatistics]:
    """Statistics among the tensors of a lerobot file: its normaliser's, or an older model's own weights.

    Names are `observation.state.mean`, or `normalize_inputs.buffer_observation_state.mean`.

    Raises:
        CheckpointError: states or actions have none.
    """
    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for key, tensor in tensors.items():
        name, _, number = key.rpartition(".")
        name = name.rpartition("buffer_")[2].replace("observation_", "observation.")
        if name in _LEROBOT_PARTS:
            found[_LEROBOT_PARTS[name]][number] = np.asarray(tensor, np.float64).reshape(-1)
    if empty := [part for part, numbers in found.items() if not numbers]:
        raise CheckpointError(
            f"{where} holds no statistics of {' and '.join(empty)}; it is of another step, or damaged."
        )
    return {part: _statistics(numbers, f"{where}: {part}") for part, numbers in found.items()}


def _statistics(numbers: Mapping[str, Any], where: str) -> FlowStatistics:
    rows = {name: tuple(map(float, row)) for name, row in numbers.items() if np.ndim(row) == 1}
    if any(not np.isfinite(row).all() for row in rows.values()):
        raise CheckpointError(f"{where} has numbers that are not finite; the data set it was made of is damaged.")
    return FlowStatistics(numbers=rows, where=where)


def pad_dims(x: npt.ArrayLike, size: int) -> FloatArray:
    """Fill the last dimension [..., D] up with zeros."""
    x = np.asarray(x, np.float32)
    assert x.shape[-1] <= size, f"{x.shape[-1]} dimensions do not fit into the {size} of the model"
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def to_deltas(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int) -> FloatArray:
    """Subtract the state [B, S] from the first `dims` dimensions of actions [B, H, A], both in their own units."""
    return _shift(actions, state, dims, -1.0)


def from_deltas(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int) -> FloatArray:
    """Add the state again: the inverse of `to_deltas`."""
    return _shift(actions, state, dims, 1.0)


def _shift(actions: npt.ArrayLike, state: npt.ArrayLike, dims: int, sign: float) -> FloatArray:
    out = np.array(actions, np.float32)
    out[..., :dims] += sign * np.asarray(state, np.float32)[..., None, :dims]
    return out
