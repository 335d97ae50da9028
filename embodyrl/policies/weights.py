"""Checks that the names and shapes of a checkpoint's weights match a model; every difference is an error."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from embodyrl.errors import CheckpointError

_UNEXPECTED_FIX = (
    "config.json and the weights do not belong together, or adapters are not merged; take both from one repository."
)
_MISSING_FIX = (
    "The checkpoint is incomplete, or of another model; download all its shards. Missing weights are never initialized "
    "randomly."
)
_SHAPE_FIX = "config.json does not belong to these weights; take both from one repository."


def check_weights(
    model_weights: Mapping[str, Tensor],
    saved_weights: Mapping[str, Tensor],
    where: Path,
    *,
    optional_prefixes: Collection[str] = (),
    ignored_prefixes: Collection[str] = (),
    fix: str | None = None,
    fixes: Mapping[str, str] | None = None,
    format_name: Callable[[str], str] = "'{}'".format,
) -> None:
    """Check that the weights of a checkpoint have the names and shapes of a model's weights.

    Args:
        model_weights: the model's weights by name.
        saved_weights: the checkpoint's weights by the same names.
        where: folder or file of the checkpoint, for error messages.
        optional_prefixes: prefixes of parts that may be missing completely; a part with only some of its weights is an
            error.
        ignored_prefixes: prefixes of names in the checkpoint that are ignored if the model lacks them.
        fix: sentence with the fix for all mismatches that `fixes` does not cover; default: a fix for published
            checkpoints.
        fixes: fixes of shape mismatches by prefix of the weight's name.
        format_name: function that formats the name of a weight for messages.

    Raises:
        CheckpointError: weights are missing, unexpected or of another shape; the message names them.
    """
    problems = []
    if unexpected := sorted(
        format_name(key)
        for key in saved_weights
        if key not in model_weights and not key.startswith(tuple(ignored_prefixes))
    ):
        problems.append(f"has {len(unexpected)} unexpected weights: {_format_list(unexpected)}")
    absent = tuple(
        part
        for part in optional_prefixes
        if not any(key.startswith(part) and key in model_weights for key in saved_weights)
    )
    if missing := sorted(
        format_name(key) for key in model_weights if key not in saved_weights and not key.startswith(absent)
    ):
        problems.append(f"lacks {len(missing)} of {len(model_weights)} weights: {_format_list(missing)}")
    if problems:
        raise CheckpointError(
            f"{where} {'; it '.join(problems)}. {fix or (_UNEXPECTED_FIX if unexpected else _MISSING_FIX)}"
        )
    if mismatched := sorted(
        key for key in saved_weights if key in model_weights and saved_weights[key].shape != model_weights[key].shape
    ):
        shape_fix = next(
            (text for part, text in (fixes or {}).items() if mismatched[0].startswith(part)), fix or _SHAPE_FIX
        )
        shapes = [
            f"{format_name(key)} {list(saved_weights[key].shape)} instead of {list(model_weights[key].shape)}"
            for key in mismatched
        ]
        raise CheckpointError(
            f"{where}: {len(mismatched)} weights differ in shape from this model: {_format_list(shapes)}. {shape_fix}"
        )


def _format_list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the memory-mapped weights of a safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is missing, truncated or not a safetensors file ({error}). Use another checkpoint, or download "
            "this one again."
        ) from error


def fill_weights(model_weights: Mapping[str, Tensor], path: Path, *, optional: Collection[str], fix: str) -> None:
    """Copy the weights of a file into `model_weights`, in place; after an error, all weights are unchanged.

    Args:
        model_weights: weights by name.
        path: the file.
        optional: prefixes of parts that are optional in the model and in the file.
        fix: sentence with the fix for mismatches.

    Raises:
        CheckpointError: the file is missing or damaged; weights are missing, unexpected or of another shape.
    """
    saved = read_weights(path)
    check_weights(model_weights, saved, path, optional_prefixes=optional, ignored_prefixes=optional, fix=fix)
    with torch.no_grad():
        for key in model_weights.keys() & saved.keys():
            model_weights[key].copy_(saved[key])
