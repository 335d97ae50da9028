"""Statistics of states and actions in checkpoints of pi0, pi0.5 and SmolVLA, and scaling. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import check_keys
from embodyrl.policies.vla.folder import Clip, check_statistics, compute_clip_range, find_data_set
from embodyrl.types import FloatArray

OPENPI_FILE = "norm_stats.json"
"""Name of openpi's statistics file: {"norm_stats": {"state": {"mean": [...], "std": ..., "q01": ..., "q99": ...},
"actions": ...}}."""
OPENPI_EPS, LEROBOT_EPS = 1e-6, 1e-8
"""Numbers that each format adds to denominators.
LeRobot adds its number only in some cases, which changes results by at most 1e-8 unless the deviation is zero."""
PARTS = ("state", "actions")
_LEROBOT_PARTS = {"observation.state": "state", "action": "actions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Affine map: normalized = (x - shift) / scale for the first D dimensions; other dimensions are unchanged."""

    shift: tuple[float, ...]
    scale: tuple[float, ...]
    clip: Clip | tuple[()] = ()
    """Lowest and highest values by dimension, to which `normalize` clips; (): no clipping."""

    def normalize(self, x: npt.ArrayLike) -> FloatArray:
        """Normalize the first D elements of the last dimension of x."""
        out = np.array(x, np.float64)
        size = len(self.shift)
        if self.clip:
            out[..., :size] = np.clip(out[..., :size], *self.clip)
        out[..., :size] = (out[..., :size] - np.asarray(self.shift)) / np.asarray(self.scale)
        return out.astype(np.float32)

    def unnormalize(self, x: npt.ArrayLike) -> FloatArray:
        """Invert `normalize`: map normalized values to the original units."""
        out = np.array(x, np.float64)
        size = len(self.shift)
        out[..., :size] = out[..., :size] * np.asarray(self.scale) + np.asarray(self.shift)
        return out.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatistics:
    """Statistics of states or actions by dimension: mean and std, q01 and q99, or all four."""

    numbers: Mapping[str, tuple[float, ...]]
    where: str

    def mean_std(self, eps: float = OPENPI_EPS) -> Affine:
        """Return the map (x - mean) / (std + eps), as in pi0 and SmolVLA.

        Raises:
            CheckpointError: mean or std is missing.
        """
        mean, std = self._get_pair("mean", "std")
        return Affine(shift=mean, scale=tuple(s + eps for s in std))

    def quantiles(self, eps: float = OPENPI_EPS) -> Affine:
        """Return the map (x - q01) / (q99 - q01 + eps) * 2 - 1, as in pi0.5.

        Raises:
            CheckpointError: q01 or q99 is missing.
        """
        low, high = self._get_pair("q01", "q99")
        half_range = tuple((b - a + eps) / 2 for a, b in zip(low, high, strict=True))
        return Affine(shift=tuple(a + h for a, h in zip(low, half_range, strict=True)), scale=half_range)

    def clip(self, size: int) -> Clip:
        """Return the range of the first `size` dimensions, see `compute_clip_range`."""
        low, high = compute_clip_range(self.numbers)
        return low[:size], high[:size]

    def _get_pair(self, first: str, second: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        values = [self.numbers.get(name, ()) for name in (first, second)]
        if not values[0] or len(values[0]) != len(values[1]):
            raise CheckpointError(
                f"{self.where} has no usable {first} and {second}; found only: "
                f"{', '.join(sorted(self.numbers)) or 'none'}. "
                f"Download the file again, or set model.normalization to the mode of the checkpoint's training."
            )
        return values[0], values[1]


def read_openpi(path: Path) -> dict[str, FlowStatistics]:
    """Read openpi's `norm_stats.json`: statistics of `state` and `actions`.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    with reject_malformed(path, "Use the file with the statistics of the training data in the checkpoint's assets."):
        content = read_json(path)["norm_stats"]
        check_keys(content, path, ignored=PARTS)
        return {part: to_statistics(content[part], f"{path}: {part}") for part in PARTS}


STATISTIC_PATTERN = re.compile(
    r"(?:(?:un)?normalize_\w+?\.)?(?:(?P<robot>.+?)[._])?(?:buffer[._])?"
    r"(?P<part>observation[._]state|action)\.(?P<number>mean|std|min|max|q01|q10|q50|q90|q99)"
)
"""Pattern of a statistic's name, such as `observation.state.mean` or `normalize_inputs.buffer_observation_state.mean`.
Models for several robots add the robot's name before `buffer`: `so100.buffer.action.mean`."""


def read_lerobot(tensors: Mapping[str, Any], where: Path, robot: str | None = None) -> dict[str, FlowStatistics]:
    """Read the statistics in a LeRobot file: from its normalizer, or from the weights of an older model.

    Args:
        tensors: tensors by name; see `STATISTIC_PATTERN`.
        where: the file, for messages.
        robot: robot of the statistics, if there are several.

    Raises:
        CheckpointError: statistics of states or actions are missing, or several robots exist and none is selected.
    """
    statistics: dict[str, dict[str, dict[str, Any]]] = {}
    for key, tensor in tensors.items():
        if (match := STATISTIC_PATTERN.fullmatch(key)) is not None:
            name = "" if match["robot"] in (None, "buffer") else match["robot"]
            part = _LEROBOT_PARTS[match["part"].replace("_", ".")]
            row = np.asarray(tensor, np.float64).reshape(-1).tolist()
            statistics.setdefault(name, {}).setdefault(part, {})[match["number"]] = row
    selected = next(iter(statistics.values()), {})
    if (robot is not None and set(statistics) - {""}) or any(numbers != selected for numbers in statistics.values()):
        selected = statistics[find_data_set(robot, statistics, where)]
    if missing := [part for part in PARTS if not selected.get(part)]:
        raise CheckpointError(
            f"{where} contains no statistics of {' and '.join(missing)}; the file is damaged or belongs "
            "to another processor step."
        )
    return {part: to_statistics(selected[part], f"{where}: {part}") for part in PARTS}


def to_statistics(numbers: Mapping[str, Any], where: str) -> FlowStatistics:
    """Check and convert statistics that were read from a file. `where` is `<file>: <part>`, for error messages.

    Raises:
        CheckpointError: see `check_statistics`.
    """
    rows = {name: tuple(map(float, row)) for name, row in numbers.items() if np.ndim(row) == 1}
    check_statistics(rows, where, varies=where.endswith(PARTS[1]))
    return FlowStatistics(numbers=rows, where=where)
