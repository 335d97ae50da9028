"""Normalization statistics of the training data, and normalization of observations and actions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.errors import CheckpointError
from embodyrl.policies.lerobot.config import ACTION, LeRobotConfig, Normalization
from embodyrl.policies.tensors import to_device

STATISTIC_PAIRS = {
    Normalization.MEAN_STD: ("mean", "std"),
    Normalization.MIN_MAX: ("min", "max"),
    Normalization.QUANTILES: ("q01", "q99"),
    Normalization.QUANTILE10: ("q10", "q90"),
}
"""Names of the two statistics that each kind of normalization uses."""
CLIP = ("low", "high")
"""Names of the bounds to which values are clipped before normalization; only `embodyrl sft` writes bounds."""


Statistics = Mapping[str, Mapping[str, Tensor]]
"""Normalization statistics by feature and name (mean, std, min, max)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Normalized observations of T steps, oldest first."""

    state: Tensor | None
    """[B, T, S] state."""
    environment: Tensor | None
    """[B, T, E] environment state."""
    images: Tensor | None
    """[B, T, C, 3, H, W] images."""


class Normalizer:
    """Normalization of each feature by its type. A feature without statistics is unchanged."""

    def __init__(self, config: LeRobotConfig, eps: float, device: torch.device) -> None:
        self._eps, self._device = eps, device
        self._modes: dict[str, Normalization] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, feature in (config.input_features | config.output_features).items():
            mode = config.normalization_mapping.get(feature.type, Normalization.IDENTITY)
            if mode is not Normalization.IDENTITY:
                self._modes[name] = mode
                self._shapes[name] = (feature.shape[0], 1, 1) if feature.type == "VISUAL" else feature.shape
        self._statistics: dict[str, list[Tensor]] = {}

    def set_statistics(self, statistics: Statistics, where: object) -> None:
        """Copy statistics (by feature and name).

        Raises:
            CheckpointError: a feature lacks the statistics of its kind of normalization.
        """
        for name, mode in self._modes.items():
            if not (feature_statistics := statistics.get(name)):
                continue
            if missing := [key for key in STATISTIC_PAIRS[mode] if key not in feature_statistics]:
                raise CheckpointError(
                    f"{where}: {name} has no {' and no '.join(missing)}, which {mode} normalization needs. Train the "
                    "policy on a data set with these statistics, or download its processor files again."
                )
            rows = [
                feature_statistics[key].float() for key in (*STATISTIC_PAIRS[mode], *CLIP) if key in feature_statistics
            ]
            size = math.prod(self._shapes[name])
            if any(row.numel() != size or not row.isfinite().all() for row in rows):
                raise CheckpointError(
                    f"{where}: the statistics of {name} are not {size} finite numbers. Download the file again."
                )
            self._statistics[name] = [to_device(row.view(self._shapes[name]), self._device) for row in rows]

    def normalize(self, name: str, x: Tensor) -> Tensor:
        """Normalize values [..., *shape] of a feature, where `shape` is the shape of its statistics."""
        if name not in self._statistics:
            return x
        first, second, *limits = self._statistics[name]
        x = x.clamp(*limits) if limits else x
        if self._modes[name] is Normalization.MEAN_STD:
            return (x - first) / (second + self._eps)
        return 2 * (x - first) / self._get_span(first, second) - 1

    def unnormalize(self, name: str, x: Tensor) -> Tensor:
        """Convert normalized values [..., *shape] of a feature to the original units.

        The result inverts `normalize` exactly except for the epsilon of MEAN_STD normalization and for clipping.
        """
        if name not in self._statistics:
            return x
        first, second, *_ = self._statistics[name]
        if self._modes[name] is Normalization.MEAN_STD:
            return x * second + first
        if self._modes[name] is Normalization.MIN_MAX:
            return (x + 1) / 2 * self._get_span(first, second) + first
        return (x + 1.0) * self._get_span(first, second) / 2.0 + first

    def get_varying_mask(self) -> Tensor | None:
        """Return a mask [A]: 0 for action dimensions that are constant in the data, else 1; None if not scaled."""
        if ACTION not in self._statistics:
            return None
        first, second, *_ = self._statistics[ACTION]
        deviation = second if self._modes[ACTION] is Normalization.MEAN_STD else second - first
        return (deviation.abs() > 1e-6).float()

    def _get_span(self, first: Tensor, second: Tensor) -> Tensor:
        span = second - first
        return span.masked_fill(span == 0, self._eps)
