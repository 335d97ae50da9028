"""Weights in the public layout: safetensors shards in, safetensors shards out, strictly checked; no code is run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft.config import CONFIG_FILE, INDEX_FILE, RANDOM_INIT_KEY

SHARD_BYTES = 5 * 10**9
VALUE_HEAD_FILE = "value_head.safetensors"
VALUE_PREFIX = "value_head."
SIDE_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "dataset_statistics.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tiny_vit_specs.json",
)


def weight_files(folder: Path) -> list[Path]:
    """Shards of the model in a folder, as the index names them; empty if there are none.

    Raises:
        CheckpointError: the index is malformed or names a file that is not there.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return sorted(folder.glob("model*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. Fetch the file again.") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which {INDEX_FILE} names ({len(names)} shards in all). The download "
            f"or copy is incomplete; fetch the missing files."
        )
    return [folder / name for name in names]


def load_into(module: nn.Module, folder: Path) -> None:
    """Copy the weights of a folder into a module, in place, casting to the module's dtypes.

    All headers are checked before the first weight is touched. Weights of a value head are taken where both sides
    have them: `value_head.safetensors`, or keys of that prefix among the model's own.

    Raises:
        CheckpointError: a file is unreadable or truncated, a key is missing or surplus, or a shape differs.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors. Point model.path at a folder with the whole checkpoint (weights "
            f"in .bin or .pt form are not read, because loading them can run code)."
        )
    if (folder / VALUE_HEAD_FILE).exists():
        files = [*files, folder / VALUE_HEAD_FILE]
    target = module.state_dict()
    _check_keys(target, {path: _shapes(path) for path in files}, folder)
    with torch.no_grad():
        for path in files:
            for key, tensor in _tensors(path):
                if key in target:
                    target[key].copy_(tensor)


def save_from(module: nn.Module, folder: Path, side_files: Mapping[str, bytes]) -> None:
    """Write a module's weights (in their own dtypes), its value head and the given side files to a folder.

    The caller provides a fresh folder and makes the write atomic by renaming it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
    value_head = {key: state.pop(key) for key in list(state) if key.startswith(VALUE_PREFIX)}
    if value_head:
        save_file(value_head, folder / VALUE_HEAD_FILE, metadata={"format": "pt"})
    shards = _split(state)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes, state.values()))}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name, content in side_files.items():
        (folder / name).write_bytes(content)


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Read tokenizer, preprocessor, statistics and configuration, so that `save_from` can write them again.

    The marker that asks for random weights is dropped: a saved folder has weights, and losing them must be an error.
    """
    found = {name: (folder / name).read_bytes() for name in SIDE_FILES if (folder / name).exists()}
    config = json.loads(found[CONFIG_FILE])
    if config.pop(RANDOM_INIT_KEY, None) is not None:
        found[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()
    return found


def _check_keys(target: Mapping[str, Tensor], shapes: dict[Path, dict[str, list[int]]], folder: Path) -> None:
    seen: set[str] = set()
    for path, entries in shapes.items():
        for key, shape in entries.items():
            if key not in target and not key.startswith(VALUE_PREFIX):
                raise CheckpointError(
                    f"{path} has a weight '{key}' that this model does not know. config.json and the weights do not "
                    f"belong together, or LoRA adapters are not merged; take both from one repository."
                )
            if key in target and shape != list(target[key].shape):
                if key.startswith(VALUE_PREFIX):
                    hint = "The value head is of a run with another reward_type; use that one, or remove the head."
                else:
                    hint = "config.json does not belong to these weights; take both from one repository."
                needed = list(target[key].shape)
                raise CheckpointError(f"{path}: weight '{key}' has shape {shape}, this model needs {needed}. {hint}")
        seen |= entries.keys()
    has_values = any(key.startswith(VALUE_PREFIX) for key in seen)
    missing = [key for key in target if key not in seen and (has_values or not key.startswith(VALUE_PREFIX))]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(target)} weights, the first is '{missing[0]}'. Files read: "
            f"{', '.join(path.name for path in shapes)}. The checkpoint is incomplete; fetch all its shards."
        )


def _shapes(path: Path) -> dict[str, list[int]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_slice(key).get_shape() for key in file.keys() if not _ignored(key)}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file ({error}). Its download or copy was cut off; fetch it again."
        ) from error


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            if not _ignored(key):
                yield key, file.get_tensor(key)


def _ignored(key: str) -> bool:
    """Old conversions carry the rotary frequencies, which are computed here."""
    return key.endswith("rotary_emb.inv_freq")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _split(state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in state.items():
        if shards[-1] and size + _bytes(tensor) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += _bytes(tensor)
    return shards
