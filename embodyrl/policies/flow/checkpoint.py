"""Weights of flow policies from and to folders: safetensors in any public layout, strictly checked; no code is run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.layouts import Layout, Source, check_weights, fresh_source, to_ours, to_theirs
from embodyrl.policies.openvla_oft.checkpoint import SHARD_BYTES, Change, map_weights, weight_files


def load_weights(target: Mapping[str, Tensor], folder: Path, change: Change | None = None) -> Source:
    """Copy the weights of a folder into those of a model, in place, casting to its dtypes; return how they were stored.

    Everything is checked before the first weight is touched. Heads that RL adds may be missing on either side.

    Args:
        target: weights by our names, without adapters.
        folder: safetensors shards in any known layout.
        change: applied to each weight by our name (adapters are merged so).

    Raises:
        CheckpointError: a file is unreadable or truncated; weights are missing, surplus, of another shape, or untied.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors. Point model.path at a folder with the whole checkpoint; weights in "
            f"other forms are not read, because loading them can run code."
        )
    stored: dict[str, Tensor] = {}
    for path in files:
        found = map_weights(path)
        if twice := sorted(found.keys() & stored.keys()):
            raise CheckpointError(f"{path}: weight '{twice[0]}' is in another shard too; fetch the folder again.")
        stored |= found
    weights, source = to_ours(stored, folder)
    check_weights(target, weights, source, folder)
    with torch.no_grad():
        for key, tensor in weights.items():
            if key in target:
                target[key].copy_(change(key, tensor) if change else tensor)
    unread = {source.layout.theirs(key): tensor for key, tensor in weights.items() if key not in target}
    return replace(source, aside=dict(source.aside) | unread)


def save_weights(weights: Mapping[str, Tensor], folder: Path, like: Source | Layout) -> None:
    """Write weights as safetensors shards into a fresh folder.

    Args:
        weights: by our names, without adapters; they keep their dtypes.
        folder: the caller makes the write atomic by renaming it.
        like: what `load_weights` returned, to store them under the same names with the same weights beside them; or a
            layout, to store them as its loader wants them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: tensor.detach().cpu() for key, tensor in weights.items()}
    source = fresh_source(like, weights) if isinstance(like, Layout) else like
    save_torch_state_dict(_apart(to_theirs(weights, source)), folder, max_shard_size=SHARD_BYTES)


def _apart(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what shares memory: the writer would keep one name of the two."""
    seen: set[int] = set()
    apart = {}
    for key, tensor in stored.items():
        apart[key] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    return apart
