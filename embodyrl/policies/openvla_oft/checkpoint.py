"""Weights in the layout of published checkpoints. Safetensors shards are strictly checked; no code is executed."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft.config import PREPROCESSOR_FILE, TINY_VIT_FILE
from embodyrl.policies.vla.folder import (
    CONFIG_FILE,
    STATISTICS_FILE,
    TOKENIZER_FILE,
    read_side_file,
    remove_random_init_key,
)
from embodyrl.policies.weights import check_weights, read_weights
from embodyrl.text.model_folder import list_weight_files

VALUE_HEAD = "value_head"
ACTION_SCALE = "action_scale"
RESIDUAL_ACTOR = "residual_actor"
RL_COMPONENTS = (VALUE_HEAD, ACTION_SCALE, RESIDUAL_ACTOR)
"""Components added by RL, optional in both the model and the checkpoint."""
SFT_COMPONENTS = ("proprio_projector", "action_head", "noisy_action_projector")
"""Components that SFT may initialize randomly."""
COMPONENTS = (*RL_COMPONENTS, *SFT_COMPONENTS)
"""Components that may have separate files. Each name is a model attribute, a key prefix and a file stem."""


SHARD_BYTES = 5 * 10**9
SIDE_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    PREPROCESSOR_FILE,
    "processor_config.json",
    STATISTICS_FILE,
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TINY_VIT_FILE,
)


def get_component(key: str) -> str:
    """Return the first part of a key: `proprio_projector.fc1.weight` belongs to `proprio_projector`."""
    return key.partition(".")[0]


def list_separate_components(keys: Iterable[str]) -> list[str]:
    """Return the components of a model (given its state-dict keys) that are stored in separate files."""
    present = {get_component(key) for key in keys}
    return [name for name in COMPONENTS if name in present]


def find_component(folder: Path, name: str) -> Path | None:
    """Return the path of `<name>.safetensors` (embodyrl) or `<name>--<step>_checkpoint.pt` (published format).

    The result is None if neither exists.

    Raises:
        CheckpointError: several files in the published format match.
    """
    local_file = folder / f"{name}.safetensors"
    if local_file.exists():
        return local_file
    candidates = sorted(folder.glob(f"*{name}*checkpoint*.pt"))
    if len(candidates) > 1:
        raise CheckpointError(
            f"{folder} contains {len(candidates)} files of '{name}': {', '.join(p.name for p in candidates)}. Keep "
            f"only the file of the same training step as the weights."
        )
    return candidates[0] if candidates else None


def read_pt(path: Path, name: str) -> dict[str, Tensor]:
    """Read a published `.pt` state dict and rename its weights to the model's keys, without executing code in the file.

    Raises:
        CheckpointError: the file is truncated, or contains objects other than tensors.
    """
    try:
        # Memory-mapped, so that only copied tensors are read from a file of several GB.
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # Prefix of DistributedDataParallel.
        state = {str(key).removeprefix("module."): tensor for key, tensor in raw.items()}
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a state dict of tensors ({str(error).splitlines()[0]}). It is truncated, or "
            f"contains Python objects, whose loading could run code; download it again."
        ) from error
    other_keys = [key for key, tensor in state.items() if not isinstance(tensor, Tensor)]
    if other_keys:
        raise CheckpointError(
            f"{path}: '{other_keys[0]}' is not a tensor. The file is not a state dict; download it again."
        )
    return {key if key.startswith(f"{name}.") else f"{name}.{key}": tensor for key, tensor in state.items()}


_FIXES = {
    VALUE_HEAD: "The value head is from a run with another reward_type; use that reward_type, or remove the head.",
    RESIDUAL_ACTOR: "Set model.num_action_chunks and model.residual_repeated to the values of the training run.",
}
"""Suggested fix of a shape mismatch by component, for error messages."""

WeightTransform = Callable[[str, Tensor], Tensor]
"""Function that receives a weight's name and value, and returns the value to load."""


def map_weights(path: Path) -> dict[str, Tensor]:
    """Return memory-mapped weights of a safetensors file; rotary frequencies of old conversions are dropped.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    return {key: tensor for key, tensor in read_weights(path).items() if not key.endswith("rotary_emb.inv_freq")}


def load_model(
    module: nn.Module,
    folder: Path,
    *,
    transform: WeightTransform | None = None,
    components_folder: Path | None = None,
    fresh_heads: bool = False,
) -> None:
    """Copy the weights of a folder into a module, in place, with the module's dtypes.

    All checks run before the first weight is changed. Heads and projectors have separate files. RL components are
    optional; the value head may also be in the model's shards.

    Args:
        module: module on any device; injected adapters are unchanged.
        folder: folder of the model's shards and component files.
        transform: function applied to each weight.
        components_folder: another folder with component files.
        fresh_heads: allow missing heads and projectors, which keep the module's weights.

    Raises:
        CheckpointError: a file is unreadable or truncated, a key is missing or unexpected, or a shape differs.
    """
    target = get_base_state(module)
    shards = list_weight_files(folder)
    if not shards:
        raise CheckpointError(
            f"{folder} contains no model*.safetensors. Set model.path to a folder with the full checkpoint (.bin "
            f"files are not loaded, because that can run code), and model.lora.path to an adapter."
        )
    optional = {*RL_COMPONENTS, *SFT_COMPONENTS} if fresh_heads else {*RL_COMPONENTS}
    files = _map_components(target, components_folder or folder, optional)
    # Published shards may also contain components; the separate files are used, because they are trained further.
    separate_components = set(list_separate_components(target)) - {VALUE_HEAD}
    for path in shards:
        files[path] = {
            k: tensor for k, tensor in map_weights(path).items() if get_component(k) not in separate_components
        }
    _copy(target, files, folder, optional, transform)


def load_components(module: nn.Module, folder: Path) -> None:
    """Copy the components of a folder into a module.

    Raises:
        CheckpointError: a component is missing (except optional RL components), or its shapes differ.
    """
    state = module.state_dict()
    names = list_separate_components(state)
    target = {key: tensor for key, tensor in state.items() if get_component(key) in names}
    _copy(target, _map_components(state, folder, {*RL_COMPONENTS}), folder, {*RL_COMPONENTS})


def get_base_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict under the published names, without injected adapters."""
    return {
        key.replace(".base_layer.", "."): tensor for key, tensor in module.state_dict().items() if ".lora_" not in key
    }


def save_model(module: nn.Module, folder: Path, side_files: Mapping[str, bytes]) -> None:
    """Write a module's weights (with their dtypes), its components and the given side files to a folder.

    The caller provides a new folder and makes the write atomic by renaming it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    save_components(state, folder)
    separate_components = list_separate_components(state)
    shards = {key: tensor for key, tensor in state.items() if get_component(key) not in separate_components}
    save_torch_state_dict(shards, folder, max_shard_size=SHARD_BYTES)
    save_side_files(folder, side_files)


def save_components(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write each component of a state dict to its own file."""
    for name in list_separate_components(state):
        part = {key: tensor.detach().contiguous() for key, tensor in state.items() if get_component(key) == name}
        save_file(part, folder / f"{name}.safetensors", metadata={"format": "pt"})


def save_side_files(folder: Path, side_files: Mapping[str, bytes]) -> None:
    """Write the files of tokenizer, preprocessor, statistics and configuration to a folder."""
    for name, content in side_files.items():
        (folder / name).write_bytes(content)


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Read the files of tokenizer, preprocessor, statistics and configuration, for `save_model`."""
    files = {name: read_side_file(folder, name) for name in SIDE_FILES if (folder / name).exists()}
    return files | {CONFIG_FILE: remove_random_init_key(files[CONFIG_FILE])}


def _map_components(state: Mapping[str, Tensor], folder: Path, optional: set[str]) -> dict[Path, dict[str, Tensor]]:
    files: dict[Path, dict[str, Tensor]] = {}
    for name in list_separate_components(state):
        path = find_component(folder, name)
        if path is not None:
            files[path] = read_pt(path, name) if path.suffix == ".pt" else map_weights(path)
        elif name not in optional:
            raise CheckpointError(
                f"{folder} has neither {name}.safetensors nor {name}--<step>_checkpoint.pt, which this model needs. "
                f"The checkpoint is incomplete, or was trained without {name}. Check model.use_proprio "
                "and model.action_head."
            )
    return files


def _copy(
    target: Mapping[str, Tensor],
    files: dict[Path, dict[str, Tensor]],
    folder: Path,
    optional: set[str],
    transform: WeightTransform | None = None,
) -> None:
    """Check the weights of all files, then copy them; `files` is emptied so that mapped pages are freed."""
    weights_by_name = {key: tensor for weights in files.values() for key, tensor in weights.items()}
    file_suffix = {key: f" in {path.name}" for path, weights in files.items() for key in weights}
    check_weights(
        target,
        weights_by_name,
        folder,
        optional_prefixes=[f"{name}." for name in optional - {get_component(key) for key in weights_by_name}],
        ignored_prefixes=[f"{VALUE_HEAD}."],
        fixes=_FIXES,
        format_name=lambda key: f"'{key}'{file_suffix.get(key, '')}",
    )
    # Only `files` references the tensors from here on.
    weights_by_name.clear()
    with torch.no_grad():
        for path in list(files):
            # After `pop` and the copy, the mapped pages of a file are freed.
            for key, tensor in files.pop(path).items():
                if key in target:
                    target[key].copy_(transform(key, tensor) if transform else tensor)
