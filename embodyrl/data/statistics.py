"""Statistics of features in the format of LeRobot data sets, per episode and over all frames."""

import numpy as np
import numpy.typing as npt

from embodyrl.types import BoolArray, IntArray

Stats = dict[str, npt.NDArray[np.float64]]
"""Statistics of one feature by name: min, max, mean, std, q01, q10, q50, q90, q99 and count."""

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def compute_vector_stats(values: np.ndarray) -> Stats:
    """Return statistics over the first axis of [T] or [T, D], with shape [1] or [D]; `count` has shape [1]."""
    array = values.reshape(len(values), -1).astype(np.float64)
    stats = {
        "min": array.min(axis=0),
        "max": array.max(axis=0),
        "mean": array.mean(axis=0),
        "std": array.std(axis=0),
        "count": np.array([len(array)], np.float64),
    }
    return stats | {name: np.quantile(array, q, axis=0) for name, q in QUANTILES.items()}


_RARE = 10.0
"""A dimension counts as rarely different if max - min is more than this multiple of q99 - q01."""
_CONSTANT = 1e-6
"""A dimension counts as constant if half of its range is at most this fraction of max(1, |middle|)."""


def compute_scaling_stats(values: np.ndarray, *, unit: bool) -> tuple[Stats, BoolArray, BoolArray]:
    """Return statistics [D] with which every dimension of [T, D] can be normalized, and two masks [D].

    Dimensions that rarely differ from one value get min and max as q01 and q99, their middle as mean, and half of the
    range as std. The masks are True for constant dimensions and for dimensions that rarely differ.

    Args:
        values: states or actions.
        unit: constant dimensions get a range of 1 on both sides, and std 1; False: their statistics are unchanged.
    """
    stats = compute_vector_stats(values)
    low, high = stats["min"], stats["max"]
    middle, half = (low + high) / 2, (high - low) / 2
    constant = half <= _CONSTANT * np.maximum(1.0, np.abs(middle))
    rare = ~constant & (2 * half > _RARE * (stats["q99"] - stats["q01"]))
    replacements = {"q01": low, "q99": high, "mean": middle, "std": half}
    stats |= {name: np.where(rare, row, stats[name]) for name, row in replacements.items()}
    if unit:
        replacements = dict.fromkeys(("min", "q01"), middle - 1) | dict.fromkeys(("max", "q99"), middle + 1)
        replacements |= {"mean": middle, "std": np.ones_like(half)}
        stats |= {name: np.where(constant, row, stats[name]) for name, row in replacements.items()}
    return stats, constant, rare


def describe_constant_dimensions(actions: np.ndarray, states: np.ndarray) -> str:
    """Name the dimensions that are constant, and those that rarely differ from one value; empty if there are none."""
    dimensions: dict[str, list[str]] = {"constant": [], "rarely different, scaled by min and max": []}
    for part, values in (("action", actions), ("state", states)):
        masks = compute_scaling_stats(values, unit=False)[1:]
        for names, mask in zip(dimensions.values(), masks, strict=True):
            names += [f"{part}[{index}]" for index in np.flatnonzero(mask)]
    return " · ".join(f"{name}: {', '.join(names)}" for name, names in dimensions.items() if names)


def count_pixels(frames: np.ndarray) -> IntArray:
    """Return the histogram [3, 256] of the pixel values of each channel in frames [T, H, W, 3] uint8."""
    counts = np.zeros((3, 256), np.int64)
    for frame in frames:  # `bincount` copies its input as int64
        counts += [np.bincount(channel, minlength=256) for channel in frame.reshape(-1, 3).T]
    return counts


def compute_image_stats(counts: IntArray, frames: int) -> Stats:
    """Return statistics [3, 1, 1] per channel of pixels scaled to 0..1, from the result of `count_pixels`."""
    values, total = np.arange(256) / 255.0, counts.sum(axis=1)
    mean = counts @ values / total
    stats = {
        "min": values[(counts > 0).argmax(axis=1)],
        "max": values[255 - (counts[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(counts @ values**2 / total - mean**2, 0.0)),
    }
    stats |= {name: np.array([_get_quantile(row, q) for row in counts]) for name, q in QUANTILES.items()}
    reshaped = {name: value.reshape(3, 1, 1) for name, value in stats.items()}
    return reshaped | {"count": np.array([frames], np.float64)}


def _get_quantile(counts: IntArray, q: float) -> float:
    """Return a quantile from a histogram [256] of pixels, scaled to 0..1, with the interpolation of `np.quantile`."""
    position, cumulative = (counts.sum() - 1) * q, np.cumsum(counts)
    low, high = (
        int(np.searchsorted(cumulative, rank, side="right")) for rank in (np.floor(position), np.ceil(position))
    )
    return (low + (high - low) * (position - np.floor(position))) / 255.0
