"""Weights in the public layout: safetensors shards in, safetensors shards out, strictly checked; no code is run."""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.folder import CONFIG_FILE, STATISTICS_FILE, TOKENIZER_FILE, saved_config
from embodyrl.policies.openvla_oft.config import INDEX_FILE, PREPROCESSOR_FILE, TINY_VIT_FILE
from embodyrl.policies.weights import check_weights

VALUE_HEAD = "value_head"
ACTION_SCALE = "action_scale"
RESIDUAL_ACTOR = "residual_actor"
OF_RL = (VALUE_HEAD, ACTION_SCALE, RESIDUAL_ACTOR)
"""What RL adds to a model: a checkpoint may lack it, or have it for nothing."""
FRESH = ("proprio_projector", "action_head", "noisy_action_projector")
"""Supervised training may start them at random."""
COMPONENTS = (*OF_RL, *FRESH, "vision_backbone")
"""Attribute of the model, prefix of its keys and stem of its file, all at once."""


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


def component_of(key: str) -> str:
    """First part of a key: `proprio_projector.fc1.weight` belongs to `proprio_projector`."""
    return key.partition(".")[0]


def side_components(keys: Iterable[str]) -> list[str]:
    """Components of a model (its state-dict keys) that are stored outside of the model's own shards.

    The vision backbone is one of the shards, unless FiLM has changed the names of its weights.
    """
    present = {component_of(key) for key in keys}
    film = any(key.startswith("vision_backbone.") and ".scale." in key for key in keys)
    return [name for name in COMPONENTS if name in present and (film or name != "vision_backbone")]


def find_component(folder: Path, name: str) -> Path | None:
    """`<name>.safetensors` as we save it, or the one public `<name>--<step>_checkpoint.pt`.

    Raises:
        CheckpointError: several public files fit.
    """
    own = folder / f"{name}.safetensors"
    if own.exists():
        return own
    found = sorted(folder.glob(f"*{name}*checkpoint*.pt"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} files of '{name}': {', '.join(p.name for p in found)}. Keep the one of the "
            f"training step that the model's weights are of."
        )
    return found[0] if found else None


def read_pt(path: Path, name: str) -> dict[str, Tensor]:
    """Read a public `.pt` state dict (tensors only, no code is run) under the keys that the model uses.

    Raises:
        CheckpointError: the file is truncated, or holds anything but tensors.
    """
    try:
        # Mapped: of several GB only what is copied is read.
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # As DistributedDataParallel saved them.
        state = {str(key).removeprefix("module."): tensor for key, tensor in raw.items()}
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a state dict of tensors ({str(error).splitlines()[0]}). Its download was cut "
            f"off, or it holds Python objects, which are refused because loading them can run code; fetch it again."
        ) from error
    strangers = [key for key, tensor in state.items() if not isinstance(tensor, Tensor)]
    if strangers:
        raise CheckpointError(f"{path}: '{strangers[0]}' is no tensor. The file is no state dict; fetch it again.")
    return {key if key.startswith(f"{name}.") else f"{name}.{key}": tensor for key, tensor in state.items()}


_FIXES = {
    VALUE_HEAD: "The value head is of a run with another reward_type; use that one, or remove the head.",
    RESIDUAL_ACTOR: "Use the model.num_action_chunks and model.residual_repeated that it was trained with.",
}
"""By part what to do where its shape does not fit."""

Change = Callable[[str, Tensor], Tensor]
"""(key, weight of the file) to the weight to load; merges adapters on the way."""


def weight_files(folder: Path) -> list[Path]:
    """Shards of the model in a folder, as the index names them; empty if there are none.

    Raises:
        CheckpointError: the index is malformed or names a file that is not there.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return sorted(folder.glob("model*.safetensors"))
    try:
        # The index and not the folder says which shards there are: an old one may lie about.
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. Fetch the file again.") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which {INDEX_FILE} names ({len(names)} shards in all). The download "
            f"or copy is incomplete; fetch the missing files."
        )
    return [folder / name for name in names]


def map_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a safetensors file, mapped and not yet read; without the rotary frequencies of old conversions.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    try:
        return {key: tensor for key, tensor in load_file(path).items() if not key.endswith("rotary_emb.inv_freq")}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is missing, truncated or no safetensors file ({error}). Its download was cut off; fetch it again."
        ) from error


def load_into(
    module: nn.Module,
    folder: Path,
    *,
    change: Change | None = None,
    beside: Path | None = None,
    fresh_heads: bool = False,
) -> None:
    """Copy the weights of a folder into a module, in place, casting to the module's dtypes.

    Everything is checked before the first weight is touched. Heads and projectors come from files of their own; those
    of RL may also be missing, and a value head may lie among the model's own keys.

    Args:
        module: on any device; injected adapters stay as they are.
        folder: the model's shards, and component files.
        change: applied to each weight.
        beside: another folder to take the component files from.
        fresh_heads: heads and projectors may be missing; the module's own stay.

    Raises:
        CheckpointError: a file is unreadable or truncated, a key is missing or surplus, or a shape differs.
    """
    target = base_state(module)
    shards = weight_files(folder)
    if not shards:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors. Point model.path at a folder with the whole checkpoint (weights "
            f"in .bin form are not read, because loading them can run code; a low-rank adapter alone goes to "
            f"model.lora.path)."
        )
    optional = {*OF_RL, *FRESH} if fresh_heads else {*OF_RL}
    files = _map_components(target, beside or folder, optional)
    # Public shards may still hold what was trained further and saved apart: the file of its own counts.
    elsewhere = set(side_components(target)) - {VALUE_HEAD}
    for path in shards:
        files[path] = {k: tensor for k, tensor in map_weights(path).items() if component_of(k) not in elsewhere}
    _copy(target, files, folder, optional, change)


def load_components(module: nn.Module, folder: Path) -> None:
    """Copy the components that a folder holds into a module.

    Raises:
        CheckpointError: a component is missing (but for those of RL), or its shapes differ.
    """
    state = module.state_dict()
    names = side_components(state)
    target = {key: tensor for key, tensor in state.items() if component_of(key) in names}
    _copy(target, _map_components(state, folder, {*OF_RL}), folder, {*OF_RL})


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
    shards = {key: tensor for key, tensor in state.items() if component_of(key) not in beside}
    save_torch_state_dict(shards, folder, max_shard_size=SHARD_BYTES)
    save_side_files(folder, side_files)


def save_components(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write each component of a state dict to its own file."""
    for name in side_components(state):
        part = {key: tensor.detach().contiguous() for key, tensor in state.items() if component_of(key) == name}
        save_file(part, folder / f"{name}.safetensors", metadata={"format": "pt"})


def save_side_files(folder: Path, side_files: Mapping[str, bytes]) -> None:
    """Write tokenizer, preprocessor, statistics and configuration."""
    for name, content in side_files.items():
        (folder / name).write_bytes(content)


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Read tokenizer, preprocessor, statistics and configuration, so that `save_from` can write them again."""
    found = {name: (folder / name).read_bytes() for name in SIDE_FILES if (folder / name).exists()}
    return found | {CONFIG_FILE: saved_config(found[CONFIG_FILE])}


def _map_components(state: Mapping[str, Tensor], folder: Path, optional: set[str]) -> dict[Path, dict[str, Tensor]]:
    files: dict[Path, dict[str, Tensor]] = {}
    for name in side_components(state):
        path = find_component(folder, name)
        if path is not None:
            files[path] = read_pt(path, name) if path.suffix == ".pt" else map_weights(path)
        elif name not in optional:
            raise CheckpointError(
                f"{folder} has neither {name}.safetensors nor {name}--<step>_checkpoint.pt, which this model needs. "
                f"Its training went without it (see model.use_proprio, action_head, use_film), or is incomplete."
            )
    return files


def _copy(
    target: Mapping[str, Tensor],
    files: dict[Path, dict[str, Tensor]],
    folder: Path,
    optional: set[str],
    change: Change | None = None,
) -> None:
    """Check all files, then copy them and empty `files` on the way, so that mapped pages do not add up."""
    found = {key: tensor for weights in files.values() for key, tensor in weights.items()}
    place = {key: f" in {path.name}" for path, weights in files.items() for key in weights}
    check_weights(
        target,
        found,
        folder,
        may_lack=[f"{name}." for name in optional - {component_of(key) for key in found}],
        may_hold=[f"{VALUE_HEAD}."],
        fixes=_FIXES,
        shown=lambda key: f"'{key}'{place.get(key, '')}",
    )
    # The files alone hold them from here on.
    found.clear()
    with torch.no_grad():
        for path in list(files):
            # Popped, so that the pages of a file can be freed as soon as it is copied.
            for key, tensor in files.pop(path).items():
                if key in target:
                    target[key].copy_(change(key, tensor) if change else tensor)
