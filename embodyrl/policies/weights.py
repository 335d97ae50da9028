"""Weights under our own names, from one safetensors file into a module that is built already."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from embodyrl.errors import CheckpointError


def fill_weights(mine: Mapping[str, Tensor], path: Path, *, optional: tuple[str, ...], fix: str) -> None:
    """Copy the weights of a file into `mine`, in place; nothing is touched where they do not fit.

    Args:
        mine: weights by name.
        path: the file.
        optional: beginnings of names that either side may lack.
        fix: what to do where the two do not fit, a sentence.

    Raises:
        CheckpointError: the file is missing or damaged; weights are missing, surplus or of another shape.
    """
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. It is incomplete or damaged.") from error
    wrong = {key for key in mine.keys() & saved.keys() if mine[key].shape != saved[key].shape}
    wrong |= {key for key in mine.keys() ^ saved.keys() if not key.startswith(optional)}
    if wrong:
        raise CheckpointError(
            f"{path} does not fit this model in {', '.join(sorted(wrong)[:8])}: missing, surplus or of another shape. "
            f"{fix}"
        )
    with torch.no_grad():
        for key in mine.keys() & saved.keys():
            mine[key].copy_(saved[key])
