"""Comparison of a checkpoint's weights with the weights of a model; every difference is an error."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from embodyrl.errors import CheckpointError

_SURPLUS = (
    "config.json and the weights do not belong together, or adapters are not merged; take both from one repository."
)
_MISSING = (
    "The checkpoint is incomplete, or of another model; download all its shards. Missing weights are never randomized."
)
_MISFIT = "config.json does not belong to these weights; take both from one repository."


def check_weights(
    mine: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    where: Path,
    *,
    may_lack: Collection[str] = (),
    may_hold: Collection[str] = (),
    fix: str | None = None,
    fixes: Mapping[str, str] | None = None,
    shown: Callable[[str], str] = "'{}'".format,
) -> None:
    """Check that names and shapes of weights match.

    Args:
        mine: the model's weights by name.
        found: the checkpoint's weights by the same names.
        where: description of the checkpoint.
        may_lack: prefixes of parts that may be missing completely; a part with only some of its weights is an
            error.
        may_hold: prefixes of names that are ignored.
        fix: sentence with the fix for other mismatches; default: a fix for published checkpoints.
        fixes: fixes of shape mismatches by prefix.
        shown: function that returns the name in the checkpoint, and its file.

    Raises:
        CheckpointError: weights are missing, unexpected or of another shape; the message names them.
    """
    wrong = []
    if surplus := sorted(shown(key) for key in found if key not in mine and not key.startswith(tuple(may_hold))):
        wrong.append(f"has {len(surplus)} unexpected weights: {_some(surplus)}")
    absent = tuple(part for part in may_lack if not any(key.startswith(part) and key in mine for key in found))
    if missing := sorted(shown(key) for key in mine if key not in found and not key.startswith(absent)):
        wrong.append(f"lacks {len(missing)} of {len(mine)} weights: {_some(missing)}")
    if wrong:
        raise CheckpointError(f"{where} {'; it '.join(wrong)}. {fix or (_SURPLUS if surplus else _MISSING)}")
    if misfits := sorted(key for key in found if key in mine and found[key].shape != mine[key].shape):
        cure = next((text for part, text in (fixes or {}).items() if misfits[0].startswith(part)), fix or _MISFIT)
        shapes = [f"{shown(key)} {list(found[key].shape)} instead of {list(mine[key].shape)}" for key in misfits]
        raise CheckpointError(
            f"{where}: {len(misfits)} weights differ in shape from this model: {_some(shapes)}. {cure}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def fill_weights(mine: Mapping[str, Tensor], path: Path, *, optional: Collection[str], fix: str) -> None:
    """Copy the weights of a file into `mine`, in place; after an error, all weights are unchanged.

    Args:
        mine: weights by name.
        path: the file.
        optional: prefixes of parts that are optional in the model and in the file.
        fix: sentence with the fix for mismatches.

    Raises:
        CheckpointError: the file is missing or damaged; weights are missing, unexpected or of another shape.
    """
    try:
        saved = load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error
    check_weights(mine, saved, path, may_lack=optional, may_hold=optional, fix=fix)
    with torch.no_grad():
        for key in mine.keys() & saved.keys():
            mine[key].copy_(saved[key])
