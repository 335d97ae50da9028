"""Statistics and config files in the checkpoint folders of several policies. Does not import torch."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import inside, read_json, read_small
from embodyrl.registry import closest
from embodyrl.text.model_folder import find_missing_weights

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
STATISTICS_FILE = "dataset_statistics.json"
"""Statistics of the training data, as in the published OpenVLA-OFT layout; written by `embodyrl sft`."""
RANDOM_INIT_KEY = "embodyrl_init"
"""Key of config.json in a folder without weights: {"embodyrl_init": "random"}."""


def read_side_file(folder: Path, name: str | Path) -> bytes:
    """Read a small file in a folder with weights, such as a tokenizer or a configuration, to save a copy.

    Raises:
        CheckpointError: the file cannot be read, is too large, or is a link to a file outside the folder.
    """
    with reject_malformed(folder / name, "Replace a link by its content, or download the checkpoint again."):
        return read_small(inside(folder, name))


def has_random_init(folder: Path) -> bool:
    """Return True if the folder requests random initial weights instead of containing weights."""
    try:
        return read_json(folder / CONFIG_FILE).get(RANDOM_INIT_KEY) == "random"
    except (OSError, ValueError, AttributeError):
        return False


def remove_random_init_key(config: bytes) -> bytes:
    """Return the config.json to save with trained weights, without the key that requests random weights."""
    content = json.loads(config)
    return config if content.pop(RANDOM_INIT_KEY, None) is None else (json.dumps(content, indent=2) + "\n").encode()


def find_missing_files(folder: Path, *, tokenizer: str, adapted: bool) -> Iterator[str]:
    """Yield problems of a `model.path` that has a valid config.json.

    Args:
        folder: checkpoint folder.
        tokenizer: end of the error message for a missing tokenizer, which names its source.
        adapted: True if adapters are trained or merged.
    """
    if not (folder / TOKENIZER_FILE).exists():
        yield f"model.path: {folder} has no {TOKENIZER_FILE}{tokenizer}"
    if not has_random_init(folder):
        if problem := find_missing_weights(folder, "model*.safetensors"):
            yield f"model.path: {problem}"
    elif adapted:
        yield (
            f"model.is_lora=true or model.lora.path: {folder} has no trained weights, and adapters of random weights "
            "cannot learn; set model.is_lora=false and model.lora.path=null, or model.path to a trained checkpoint."
        )


_SUFFIX = "_no_noops"
"""Suffix of data sets without idle steps; statistics may be named with or without it."""


def is_same_data_set(name: str, other: str) -> bool:
    """Return True if two names of data sets are equal except for the suffix `_no_noops`."""
    return name.removesuffix(_SUFFIX) == other.removesuffix(_SUFFIX)


def find_data_set(requested: str | None, known: Collection[str], where: Path) -> str:
    """Return the known data set or robot whose name equals `requested`, with or without the suffix `_no_noops`.

    If `requested` is None, return the only data set.

    Raises:
        CheckpointError: there is no such data set, or there are several and none is requested.
    """
    if requested is None:
        if len(known) == 1:
            return next(iter(known))
        raise CheckpointError(
            f"{where} has statistics of {len(known)} data sets or robots: {', '.join(sorted(known))}. Set "
            "model.unnorm_key to the name in the checkpoint's training."
        )
    base_name = requested.removesuffix(_SUFFIX)
    for key in (requested, base_name, f"{base_name}{_SUFFIX}"):
        if key in known:
            return key
    raise CheckpointError(
        f"No statistics '{requested}' (with or without '{_SUFFIX}') in {where}.{closest(requested, known)} "
        f"Known: {', '.join(sorted(known))}. Set model.unnorm_key to the data set of the checkpoint's training, or "
        f"use another model.path."
    )


def check_statistics(numbers: Mapping[str, Any], where: str, *, varies: bool = True) -> None:
    """Check statistics by name (mean, std, min, max, q01, q99, ...), each with one value per dimension.

    Args:
        numbers: statistics read from the file.
        where: file and part, for the message.
        varies: require that at least one dimension varies (for actions); not checked if all min equal max.

    Raises:
        CheckpointError: a number is not finite, lengths differ, a spread is negative, or no dimension varies.
    """
    fix = "The file, or its data, is damaged; download or compute it again."
    rows = {name: np.asarray(row, np.float64).reshape(-1) for name, row in numbers.items()}
    for name, row in rows.items():
        if not np.isfinite(row).all():
            index = int(np.flatnonzero(~np.isfinite(row))[0])
            raise CheckpointError(f"{where}: {name}[{index}] is {row[index]}, which is not finite. {fix}")
    lengths = {name: len(row) for name, row in rows.items() if name != "count"}
    if len(set(lengths.values())) > 1:
        raise CheckpointError(f"{where} has lists of different lengths: {lengths}. {fix}")
    # Equal min and max mean constant data; otherwise scaling would be impossible.
    limits = [rows[name] for name in ("min", "max") if name in rows]
    varies = varies and not (len(limits) == 2 and np.array_equal(limits[0], limits[1]))
    pairs = [(low, high) for low, high in (("min", "max"), ("q01", "q99")) if low in rows and high in rows]
    spreads = {f"{low} and {high}": rows[high] - rows[low] for low, high in pairs}
    spreads |= {"std": rows["std"]} if "std" in rows else {}
    for name, widths in spreads.items():
        if (widths < 0).any():
            index = int(np.flatnonzero(widths < 0)[0])
            raise CheckpointError(f"{where}: dimension {index} has a negative range or deviation ({name}). {fix}")
        if varies and len(widths) and not widths.any():
            raise CheckpointError(f"{where} is degenerate: no dimension varies ({name}). {fix}")


STATISTICS = ("mean", "std", "min", "max", "q01", "q10", "q90", "q99")


def read_sft_statistics(path: Path) -> dict[str, dict[str, list[float]]]:
    """Read the statistics that `embodyrl sft` wrote, by part (action, proprio) and name (see `STATISTICS`).

    Raises:
        CheckpointError: the file is malformed, or `check_statistics` finds an error.
    """
    with reject_malformed(path, "Run `embodyrl sft` again, or use another checkpoint."):
        (entry,) = read_json(path).values()
        parts = ["action", *(["proprio"] if "proprio" in entry else [])]
        statistics = {part: {name: entry[part][name] for name in STATISTICS if name in entry[part]} for part in parts}
        for part, numbers in statistics.items():
            check_statistics(numbers, f"{path}: {part}", varies=part == "action")
        return statistics


Clip = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Lowest and highest values by dimension."""


def compute_clip_range(numbers: Mapping[str, npt.ArrayLike]) -> Clip:
    """Return the range to which values are clipped before normalization with statistics of the user's data.

    The range is twice as wide as the range from min to max, with the same center.
    """
    low, high = (np.asarray(numbers[name], np.float64) for name in ("min", "max"))
    return low - (high - low) / 2, high + (high - low) / 2
