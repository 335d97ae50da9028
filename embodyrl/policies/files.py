"""Validation of checkpoint and adapter folders that other programs wrote. Does not import torch."""

import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError

ADAPTER_FIELDS = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "r"),
    *("revision", "target_modules", "task_type", "use_rslora"),
)
"""Fields of peft's `adapter_config.json` that are read, or that do not change the meaning of the saved factors."""
BASE_PRESERVING_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Adapter initializations (`init_lora_weights`) that leave the base weights unchanged, unlike PiSSA and OLoRA."""


TRANSFORMERS_FIELDS = (
    *("_attn_implementation*", "_name_or_path", "architectures", "attention_dropout", "attn_implementation"),
    *("auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "label2id"),
    *("max_position_embeddings", "model_type", "name_or_path", "pad_token_id", "pretraining_tp", "problem_type"),
    *("return_dict", "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id", "use_cache"),
    *("diversity_penalty", "length_penalty", "max_length", "num_beam*", "num_return_sequences", "repetition_penalty"),
    *("temperature", "top_k", "top_p", "typical_p"),
)
"""Fields of transformers' `config.json` that do not change the network, and fields with sampling defaults."""
LEROBOT_FIELDS = (
    *("chunk_size", "compile_mode", "compile_model", "device", "drop_n_last_frames", "dtype", "embodyrl_init"),
    *("gradient_checkpointing", "input_features", "license", "n_action_steps", "normalization_mapping"),
    *("optimizer_*", "output_features", "pretrained_*", "private", "push_to_hub", "repo_id", "scheduler_*", "tags"),
    *("type", "use_amp"),
)
"""Fields of LeRobot's `config.json` that are read, or do not change actions."""


def check_keys(
    raw: Mapping[str, Any],
    where: object,
    *,
    ignored: Collection[str] = (),
    supported: Mapping[str, Collection[Any]] | None = None,
    fix: str = "Use another checkpoint.",
) -> None:
    """Check that all keys in a config file of another program are supported.

    Unknown keys must have an empty value: null, false, 0, "", [] or {}.

    Args:
        raw: keys and values in the file.
        where: file and section, for the error message.
        ignored: keys (or patterns such as `optimizer_*`) that are read elsewhere or have no effect on actions.
        supported: supported values of keys that are not in `ignored`.
        fix: last sentence of the error message.

    Raises:
        CheckpointError: a key is unknown, or has an unsupported value; the message names all of them.
    """
    values_by_key = supported or {}
    unchecked = {key: value for key, value in raw.items() if not any(fnmatchcase(key, name) for name in ignored)}
    unsupported = {
        key: v for key, v in unchecked.items() if (v not in values_by_key[key] if key in values_by_key else v)
    }
    if unsupported:
        listing = ", ".join(f"{key}={json.dumps(value)[:80]}" for key, value in unsupported.items())
        raise CheckpointError(f"{where}: {listing} is not supported. {fix}")


def check_equal(saved: Mapping[str, Any], expected: Mapping[str, Any], where: Path, fix: str) -> None:
    """Check that a checkpoint's values in `saved` equal the values in `expected`.

    Raises:
        CheckpointError: values differ; the message contains their keys, both values, the file `where` and `fix`.
    """
    differences = ", ".join(
        f"{key} is {saved.get(key)} (this run needs {value})"
        for key, value in expected.items()
        if saved.get(key) != value
    )
    if differences:
        raise CheckpointError(f"{where} does not match this run: {differences}. {fix}")


def find_merged_adapter_problem(adapter: Path) -> str | None:
    """Return an error if an adapter folder, or a folder above, contains full model weights."""
    kinds = ("model*.safetensors*", "pytorch_model*.bin*")
    for candidate in (adapter, *adapter.parents[:2]):
        if any(path for kind in kinds for path in candidate.glob(kind)):
            return (
                f"{candidate} contains full weights, into which its adapter is already merged. Remove model.lora.path "
                "to use these weights, or copy the adapter to another folder to merge it into other weights."
            )
    return None
