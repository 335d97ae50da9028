"""Normalization statistics of the training data, and normalization of observations and actions."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.lerobot.config import ACTION, LeRobotConfig, Normalization

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


class Normalizer(nn.Module):
    """Normalization of each feature by its type. Statistics are buffers, so that they are saved with the weights.

    A feature without statistics is unchanged.
    """

    def __init__(self, config: LeRobotConfig, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self._modes: dict[str, Normalization] = {}
        for name, feature in (config.input_features | config.output_features).items():
            mode = config.normalization_mapping.get(feature.type, Normalization.IDENTITY)
            if mode is Normalization.IDENTITY:
                continue
            self._modes[name] = mode
            shape = (feature.shape[0], 1, 1) if feature.type == "VISUAL" else feature.shape
            low = 0.0 if mode is Normalization.MEAN_STD else -1.0
            unclipped = torch.finfo(torch.float32).max
            values = {"first": low, "second": 1.0, "low": -unclipped, "high": unclipped}
            for statistic, value in values.items():
                self.register_buffer(_get_buffer_name(name, statistic), torch.full(shape, value))

    def set_statistics(self, statistics: Statistics, where: object) -> None:
        """Copy statistics (by feature and name) into the buffers.

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
            names_by_buffer = {"first": STATISTIC_PAIRS[mode][0], "second": STATISTIC_PAIRS[mode][1]} | {
                key: key for key in CLIP if key in feature_statistics
            }
            for statistic, key in names_by_buffer.items():
                buffer, new_value = self.get_buffer(_get_buffer_name(name, statistic)), feature_statistics[key].float()
                if new_value.numel() != buffer.numel() or not new_value.isfinite().all():
                    raise CheckpointError(
                        f"{where}: the statistics of {name} are not {buffer.numel()} finite numbers. Download "
                        "the file again."
                    )
                buffer.copy_(new_value.view_as(buffer))

    def normalize(self, name: str, x: Tensor) -> Tensor:
        """Normalize values [..., *shape] of a feature, where `shape` is the shape of its statistics."""
        if (mode := self._modes.get(name)) is None:
            return x
        first, second = self._get_pair(name)
        x = x.clamp(*(self.get_buffer(_get_buffer_name(name, statistic)) for statistic in CLIP))
        if mode is Normalization.MEAN_STD:
            return (x - first) / (second + self._eps)
        return 2 * (x - first) / self._get_span(first, second) - 1

    def unnormalize(self, name: str, x: Tensor) -> Tensor:
        """Convert normalized values [..., *shape] of a feature to the original units.

        The result inverts `normalize` exactly except for the epsilon of MEAN_STD normalization and for clipping.
        """
        if (mode := self._modes.get(name)) is None:
            return x
        first, second = self._get_pair(name)
        if mode is Normalization.MEAN_STD:
            return x * second + first
        if mode is Normalization.MIN_MAX:
            return (x + 1) / 2 * self._get_span(first, second) + first
        return (x + 1.0) * self._get_span(first, second) / 2.0 + first

    def get_varying_mask(self) -> Tensor | None:
        """Return a mask [A]: 0 for action dimensions that are constant in the data, else 1; None if not scaled."""
        if (mode := self._modes.get(ACTION)) is None:
            return None
        first, second = self._get_pair(ACTION)
        deviation = second if mode is Normalization.MEAN_STD else second - first
        return (deviation.abs() > 1e-6).float()

    def _get_span(self, first: Tensor, second: Tensor) -> Tensor:
        span = second - first
        return span.masked_fill(span == 0, self._eps)

    def _get_pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(_get_buffer_name(name, "first")), self.get_buffer(_get_buffer_name(name, "second"))


def _get_buffer_name(name: str, statistic: str) -> str:
    return f"{name.replace('.', '/')}/{statistic}"
