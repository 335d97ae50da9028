"""Statistics of features as the layout keeps them: per episode, and aggregated over episodes."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Stats = dict[str, npt.NDArray[np.float64]]
"""min, max, mean, std, q01, q10, q50, q90, q99 and count of one feature."""

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_MAX_FRAMES = 16
_MAX_SIDE = 150


def vector_stats(values: np.ndarray) -> Stats:
    """Statistics over the first axis of [T] or [T, D]; shapes [1] or [D], count [1]."""
    array = values.reshape(len(values), -1).astype(np.float64)
    stats = {
        "min": array.min(axis=0),
        "max": array.max(axis=0),
        "mean": array.mean(axis=0),
        "std": array.std(axis=0),
        "count": np.array([len(array)], np.float64),
    }
    return stats | {name: np.quantile(array, q, axis=0) for name, q in QUANTILES.items()}


def image_stats(frames: np.ndarray) -> Stats:
    """Statistics per channel of [T, H, W, 3] uint8 scaled to 0..1, shape [3, 1, 1], from a sample of the pixels."""
    picked = frames[np.linspace(0, len(frames) - 1, min(len(frames), _MAX_FRAMES)).round().astype(int)]
    stride = max(1, frames.shape[1] // _MAX_SIDE)
    stats = vector_stats(picked[:, ::stride, ::stride].reshape(-1, 3) / 255.0)
    stats["count"] = np.array([len(picked)], np.float64)
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in stats.items()}


def aggregate(parts: Sequence[Mapping[str, np.ndarray]]) -> Stats:
    """Join statistics of disjoint parts; mean and std exactly (parallel variance), quantiles as weighted means."""
    weight = np.array([part["count"][0] for part in parts], np.float64)
    share = weight / weight.sum()

    def stacked(name: str) -> np.ndarray:
        return np.stack([part[name] for part in parts])

    def weighted(values: np.ndarray) -> np.ndarray:
        return np.tensordot(share, values, axes=1)

    mean = weighted(stacked("mean"))
    joined = {
        "min": stacked("min").min(axis=0),
        "max": stacked("max").max(axis=0),
        "mean": mean,
        "std": np.sqrt(weighted(stacked("std") ** 2 + (stacked("mean") - mean) ** 2)),
        "count": np.array([weight.sum()]),
    }
    return joined | {name: weighted(stacked(name)) for name in QUANTILES}
