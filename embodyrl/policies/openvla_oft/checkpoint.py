"""Weights in the public layout: safetensors shards in, safetensors shards out, strictly checked; no code is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft.components import (
    VALUE_HEAD,
    component_of,
    find_component,
    read_pt,
    side_components,
)
from embodyrl.policies.openvla_oft.config import CONFIG_FILE, INDEX_FILE, RANDOM_INIT_KEY

SHARD_BYTES = 5 * 10**9
_FORMAT = {"format": "pt"}
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


Change = Callable[[str, Tensor], Tensor]
"""(key, weight of the file) to the weight to load; merges adapters on the way."""


def load_into(module: nn.Module, folder: Path, *, change: Change | None = None, beside: Path | None = None) -> None:
    """Copy the weights of a folder into a module, in place, casting to the module's dtypes.

    All headers are checked before the first weight is touched. Heads and projectors come from files of their own; a
    value head may also be missing or lie among the model's own keys.

    Args:
        module: on any device; injected adapters stay as they are.
        folder: the model's shards, and component files.
        change: applied to each weight.
        beside: another folder to take the component files from.

    Raises:
        CheckpointError: a file is unreadable or truncated, a key is missing or surplus, or a shape differs.
    """
    target = base_state(module)
    files: dict[Path, str | None] = dict.fromkeys(weight_files(folder))
    if not files:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors. Point model.path at a folder with the whole checkpoint (weights "
            f"in .bin form are not read, because loading them can run code; a low-rank adapter alone goes to "
            f"model.lora.path)."
        )
    components = side_components(target)
    for name in components:
        path = find_component(beside or folder, name)
        if path is not None:
            files[path] = name
        elif name != VALUE_HEAD:
            raise CheckpointError(
                f"{beside or folder} has neither {name}.safetensors nor {name}--<step>_checkpoint.pt, which this model "
                f"needs. The checkpoint was trained without it (see model.use_proprio, action_head, use_film), or is "
                f"incomplete."
            )
    readers = {path: _reader(path, name, components) for path, name in files.items()}
    _check_keys(target, {path: reader.shapes() for path, reader in readers.items()}, folder)
    with torch.no_grad():
        for reader in readers.values():
            for key, tensor in reader.tensors():
                if key in target:
                    target[key].copy_(change(key, tensor) if change else tensor)


def load_components(module: nn.Module, folder: Path) -> None:
    """Copy the components that a folder holds into a module.

    Raises:
        CheckpointError: a component is missing (but for the value head), or its shapes differ.
    """
    state = module.state_dict()
    target = {key: tensor for key, tensor in state.items() if component_of(key) in side_components(state)}
    files = {path: name for name in side_components(state) if (path := find_component(folder, name)) is not None}
    readers = {path: _reader(path, name, []) for path, name in files.items()}
    _check_keys(target, {path: reader.shapes() for path, reader in readers.items()}, folder)
    with torch.no_grad():
        for reader in readers.values():
            for key, tensor in reader.tensors():
                if key in target:
                    target[key].copy_(tensor)


def base_state(module: nn.Module) -> dict[str, Tensor]:
    """State dict under the public names, whether or not adapters are injected; without the adapters."""
    return {
        key.replace(".base_layer.", "."): tensor for key, tensor in module.state_dict().items() if ".lora_" not in key
    }


def save_from(module: nn.Module, folder: Path, side_files: Mapping[str, bytes]) -> None:
    """Write a module's weights (in their own dtypes), its components and the given side files to a folder.

    The caller provides a fresh folder and makes the write atomic by renaming it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    save_components(state, folder)
    beside = side_components(state)
    save_shards({k: t for k, t in state.items() if component_of(k) not in beside}, folder)
    save_side_files(folder, side_files)


def save_components(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write each component of a state dict to its own file."""
    for name in side_components(state):
        part = {key: _stored(tensor) for key, tensor in state.items() if component_of(key) == name}
        save_file(part, folder / f"{name}.safetensors", metadata=_FORMAT)


def save_shards(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write weights as one file or as shards with an index; only one shard at a time is copied to host memory."""
    shards = _split(state)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({key: _stored(tensor) for key, tensor in shard.items()}, folder / name, metadata=_FORMAT)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes, state.values()))}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_side_files(folder: Path, side_files: Mapping[str, bytes]) -> None:
    """Write tokenizer, preprocessor, statistics and configuration."""
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
            of_values = component_of(key) == VALUE_HEAD
            if key not in target and not of_values:
                raise CheckpointError(
                    f"{path} has a weight '{key}' that this model does not know. config.json and the weights do not "
                    f"belong together, or LoRA adapters are not merged; take both from one repository."
                )
            if key in target and shape != list(target[key].shape):
                if of_values:
                    hint = "The value head is of a run with another reward_type; use that one, or remove the head."
                else:
                    hint = "config.json does not belong to these weights; take both from one repository."
                needed = list(target[key].shape)
                raise CheckpointError(f"{path}: weight '{key}' has shape {shape}, this model needs {needed}. {hint}")
        seen |= entries.keys()
    has_values = any(component_of(key) == VALUE_HEAD for key in seen)
    missing = [key for key in target if key not in seen and (has_values or component_of(key) != VALUE_HEAD)]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(target)} weights, the first is '{missing[0]}'. Files read: "
            f"{', '.join(path.name for path in shapes)}. The checkpoint is incomplete; fetch all its shards."
        )


class _Reader(Protocol):
    """One file of weights, read in two passes: shapes first, tensors when everything fits."""

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each weight."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one."""
        ...


@dataclass(frozen=True, slots=True)
class SafetensorsReader:
    """A safetensors file; `skipped` components are read from elsewhere."""

    path: Path
    skipped: tuple[str, ...] = ()

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each weight.

        Raises:
            CheckpointError: the file is truncated or no safetensors file.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                return {key: file.get_slice(key).get_shape() for key in file.keys() if self._wanted(key)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path} is truncated or no safetensors file ({error}). Its download or copy was cut off; fetch "
                f"it again."
            ) from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one, mapped from the file."""
        with safe_open(self.path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if self._wanted(key):
                    yield key, file.get_tensor(key)

    def _wanted(self, key: str) -> bool:
        # Old conversions carry the rotary frequencies, which are computed here.
        return component_of(key) not in self.skipped and not key.endswith("rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class PtReader:
    """A public `.pt` component file, already read."""

    state: Mapping[str, Tensor]

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each weight."""
        return {key: list(tensor.shape) for key, tensor in self.state.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one."""
        yield from self.state.items()


def _reader(path: Path, component: str | None, beside: list[str]) -> _Reader:
    if component is None:
        return SafetensorsReader(path, tuple(name for name in beside if name != VALUE_HEAD))
    return PtReader(read_pt(path, component)) if path.suffix == ".pt" else SafetensorsReader(path)


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


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
