"""Checks of files of other programs in the folders of checkpoints and adapters. Does not import torch."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError

ADAPTER_FIELDS = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "r"),
    *("revision", "target_modules", "task_type", "use_rslora"),
)
"""Fields of peft's `adapter_config.json` that are read, or that do not change the meaning of the saved factors."""
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations of adapters (`init_lora_weights`) that do not change the base weights, as PiSSA and OLoRA do."""


def check_keys(
    raw: Mapping[str, Any],
    where: object,
    *,
    ignored: Collection[str] = (),
    only: Mapping[str, Collection[Any]] | None = None,
    fix: str = "Use another checkpoint.",
) -> None:
    """Check that all keys of a file from another program are understood.

    Unknown keys must be off: null, false, 0 or empty.

    Args:
        raw: keys and values in the file.
        where: file, for the message.
        ignored: keys that are read elsewhere or have no effect on actions.
        only: supported values of further keys.
        fix: last sentence of the message.

    Raises:
        CheckpointError: a key is unknown, or has an unsupported value; the message names all of them.
    """
    supported = only or {}
    wrong = {k: v for k, v in raw.items() if k not in ignored and (v not in supported[k] if k in supported else v)}
    if wrong:
        shown = ", ".join(f"{key}={json.dumps(value)[:80]}" for key, value in wrong.items())
        raise CheckpointError(f"{where}: {shown} is not supported. {fix}")


def merged_problem(adapter: Path) -> str | None:
    """Return an error if the folder of an adapter is inside a folder with the weights of a whole model."""
    kinds = ("model*.safetensors*", "pytorch_model*.bin*")
    for place in (adapter, *adapter.parents[:2]):
        if any(path for kind in kinds for path in place.glob(kind)):
            return (
                f"{place} contains full weights, into which its adapter is already merged. Remove model.lora.path to "
                "use these weights, or copy the adapter to another folder to merge it into other weights."
            )
    return None
