"""Modules that public checkpoints keep beside the model: heads, projectors, the FiLM backbone."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from embodyrl.errors import CheckpointError

VALUE_HEAD = "value_head"
FRESH = ("proprio_projector", "action_head")
"""Supervised training may start them at random."""
COMPONENTS = (VALUE_HEAD, *FRESH, "noisy_action_projector", "vision_backbone")
"""Attribute of the model, prefix of its keys and stem of its file, all at once."""


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
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
