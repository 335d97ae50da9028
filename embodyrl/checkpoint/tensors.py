"""Exact storage of optimizer, scheduler and RNG states as safetensors and JSON, without pickle."""

import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from embodyrl.errors import CheckpointError
from embodyrl.files import read_json

_TAGS = frozenset({"$tensor", "$array", "$tuple", "$dict", "$float"})


@contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Convert file-system errors (such as a full disk) to a `CheckpointError` that names the folder."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = f" (os error {error.errno})" if isinstance(error, OSError) else ""
        raise CheckpointError(f"Cannot write to {folder}: {error}{number}") from error


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, moved to the CPU, as one safetensors file; tensors that share memory are written in full."""
    storages: set[int] = set()
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage().data_ptr()
        # safetensors rejects tensors that share memory; tied tensors are written twice and are separate after loading.
        copies[name] = copy.clone() if storage in storages else copy
        storages.add(storage)
    save_file(copies, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated or malformed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another checkpoint.")
    try:
        return load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}); it is truncated or damaged. Use another checkpoint."
        ) from error


def save_state(folder: Path, name: str, tree: dict[str, Any]) -> None:
    """Write a state tree, such as an optimizer's `state_dict()`, to `<name>.json` and `<name>.safetensors`.

    Leaves are tensors, numpy arrays, numbers, strings, booleans and None; nodes are dicts (keys: strings and integers),
    lists and tuples.

    Raises:
        TypeError: a leaf or key has another type.
    """
    tensors: dict[str, torch.Tensor] = {}
    body = _encode(tree, tensors, "")
    (folder / f"{name}.json").write_text(json.dumps(body, allow_nan=False), encoding="utf-8")
    save_tensors(folder / f"{name}.safetensors", tensors)


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """Read a state tree written by `save_state`, with tensors on the CPU.

    Raises:
        CheckpointError: a file is missing or malformed, or the two files do not match.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another checkpoint.")
    tensors = load_tensors(folder / f"{name}.safetensors")
    try:
        state = _decode(read_json(path), tensors)
        if not isinstance(state, dict):
            raise TypeError("the top level is not a JSON object")
        return state
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or does not fit {name}.safetensors ({type(error).__name__}: {error}). "
            "Use another checkpoint."
        ) from error


def get_rng_state() -> dict[str, Any]:
    """Return the state of the global generators of torch (CPU and CUDA), numpy and Python."""
    return {
        "torch": torch.get_rng_state(),
        # All visible devices: dropout and sampling use their generators.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a result of `get_rng_state`. CUDA states are restored for devices that exist in both processes."""
    torch.set_rng_state(state["torch"])
    for index, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, index)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _encode(node: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, float):
        # JSON cannot represent infinity or NaN.
        return node if math.isfinite(node) else {"$float": repr(node)}
    if isinstance(node, torch.Tensor):
        return {"$tensor": _add(node, tensors, path)}
    if isinstance(node, np.ndarray):
        return {
            "$array": _add(torch.from_numpy(np.ascontiguousarray(node)), tensors, path),
            "shape": list(node.shape),
        }
    if isinstance(node, (list, tuple)):
        items = [_encode(item, tensors, f"{path}/{i}") for i, item in enumerate(node)]
        return items if isinstance(node, list) else {"$tuple": items}
    if isinstance(node, Mapping):
        if all(isinstance(key, str) for key in node) and not _TAGS & set(node):
            return {key: _encode(value, tensors, f"{path}/{key}") for key, value in node.items()}
        if all(isinstance(key, (str, int)) for key in node):
            return {"$dict": [[k, _encode(v, tensors, f"{path}/{i}")] for i, (k, v) in enumerate(node.items())]}
    raise TypeError(f"Cannot save state '{path}' of type {type(node).__name__}; use tensors, numbers, text or lists.")


def _add(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> str:
    # Numbered, because paths are ambiguous if keys contain slashes.
    key = f"{len(tensors)}:{path}"
    tensors[key] = tensor
    return key


def _decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        return tensors[node["$tensor"]]
    if "$array" in node:
        return tensors[node["$array"]].numpy().reshape(node["shape"])
    if "$tuple" in node:
        return tuple(_decode(item, tensors) for item in node["$tuple"])
    if "$dict" in node:
        return {key: _decode(value, tensors) for key, value in node["$dict"]}
    if "$float" in node:
        return float(node["$float"])
    return {key: _decode(value, tensors) for key, value in node.items()}
