"""`config.json` of a checkpoint folder to the sizes of the model: openpi's, lerobot's, transformers' or our own."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.specs import (
    GEMMA_2B,
    GEMMA_300M,
    PI0,
    SMOLVLA,
    FlowSpec,
    LayersSpec,
    Pi0Spec,
    SmolVlaSpec,
    VisionSpec,
    expert_mlp,
)

CONFIG_FILE = "config.json"
OWN_KEY = "embodyrl_flow"
_KINDS: dict[str, type[FlowSpec]] = {"pi0": Pi0Spec, "smolvla": SmolVlaSpec}
_GEMMA = {"gemma_2b": GEMMA_2B, "gemma_300m": GEMMA_300M}
_SMOLVLM = "HuggingFaceTB/SmolVLM2-500M-"


def read_spec(folder: Path, *, adaptive: bool = False) -> FlowSpec:
    """Read the sizes of a checkpoint.

    Args:
        folder: with config.json.
        adaptive: openpi's files do not say whether they are of pi0.5.

    Raises:
        CheckpointError: the file is missing or malformed, or asks for an architecture that these models are not.
    """
    where = folder / CONFIG_FILE
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
        if OWN_KEY in config:
            return _read_own(config[OWN_KEY])
        if "vlm_config" in config:
            return _read_transformers(config)
        if config.get("type") == "smolvla":
            return _read_smolvla(config, where)
        return _read_paligemma(config, where, adaptive=adaptive or config.get("type") == "pi05")
    except CheckpointError:
        raise
    except (
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{where} is missing or malformed ({error!r}). It wants the config.json of a pi0, pi0.5 or SmolVLA "
            f"checkpoint (openpi, lerobot or transformers); fetch it again."
        ) from error


def own_config(spec: FlowSpec) -> dict[str, Any]:
    """What `read_spec` reads of a model of any size."""
    kind = next(name for name, cls in _KINDS.items() if type(spec) is cls)
    return {OWN_KEY: {"kind": kind, **asdict(spec)}}


def _read_own(raw: Mapping[str, Any]) -> FlowSpec:
    fields = dict(raw)
    cls = _KINDS[fields.pop("kind")]
    vision = VisionSpec(**fields.pop("vision"))
    language, expert = (LayersSpec(**fields.pop(name)) for name in ("language", "expert"))
    return cls(vision=vision, language=language, expert=expert, **fields)


def _read_paligemma(config: Mapping[str, Any], where: Path, *, adaptive: bool) -> Pi0Spec:
    """openpi: action_horizon, action_dim; lerobot: chunk_size, max_action_dim, max_state_dim."""
    stacks = []
    for name in ("paligemma_variant", "action_expert_variant"):
        if config[name] not in _GEMMA:
            raise CheckpointError(f"{where}: {name}={config[name]} is not known. Known: {', '.join(_GEMMA)}.")
        stacks.append(_GEMMA[config[name]])
    action_dim = int(config["action_dim"] if "action_dim" in config else config["max_action_dim"])
    return replace(
        PI0,
        language=stacks[0],
        expert=stacks[1],
        adaptive=adaptive,
        horizon=int(config["action_horizon"] if "action_horizon" in config else config["chunk_size"]),
        action_dim=action_dim,
        state_dim=int(config.get("max_state_dim", action_dim)),
    )


def _read_transformers(config: Mapping[str, Any]) -> Pi0Spec:
    text, vision = config["vlm_config"]["text_config"], config["vlm_config"]["vision_config"]
    return Pi0Spec(
        vision=_siglip(vision),
        language=_layers(text),
        expert=_layers(config["dit_config"]),
        vocab=int(text["vocab_size"]),
        horizon=int(config["chunk_size"]),
        action_dim=int(config["max_action_dim"]),
        state_dim=int(config["max_state_dim"]),
    )


def _siglip(raw: Mapping[str, Any]) -> VisionSpec:
    return VisionSpec(
        image_size=int(raw["image_size"]),
        patch_size=int(raw["patch_size"]),
        width=int(raw["hidden_size"]),
        depth=int(raw["num_hidden_layers"]),
        heads=int(raw["num_attention_heads"]),
        mlp=int(raw["intermediate_size"]),
    )


def _layers(raw: Mapping[str, Any]) -> LayersSpec:
    return LayersSpec(
        width=int(raw["hidden_size"]),
        depth=int(raw["num_hidden_layers"]),
        mlp=int(raw["intermediate_size"]),
        heads=int(raw["num_attention_heads"]),
        kv_heads=int(raw["num_key_value_heads"]),
        head_dim=int(raw["head_dim"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
    )


def _read_smolvla(config: Mapping[str, Any], where: Path) -> SmolVlaSpec:
    """The backbone's own sizes are those of SmolVLM2-500M, which lerobot's file names but does not repeat."""
    only = {"attention_mode": "cross_attn", "add_image_special_tokens": False}
    strange = {name: config[name] for name, value in only.items() if config.get(name, value) != value}
    layers = int(config.get("num_vlm_layers", SMOLVLA.language.depth))
    if (experts := int(config.get("num_expert_layers", -1))) not in (-1, 0, layers):
        strange["num_expert_layers"] = experts
    if not str(config["vlm_model_name"]).startswith(_SMOLVLM):
        strange["vlm_model_name"] = config["vlm_model_name"]
    if strange:
        raise CheckpointError(
            f"{where}: {strange} is not supported; this is SmolVLA on SmolVLM2-500M with as many expert layers."
        )
    language = replace(SMOLVLA.language, depth=layers)
    width = int(language.width * float(config.get("expert_width_multiplier", 0.75)))
    return replace(
        SMOLVLA,
        language=language,
        expert=replace(language, width=width, mlp=expert_mlp(width)),
        horizon=int(config["chunk_size"]),
        action_dim=int(config["max_action_dim"]),
        state_dim=int(config["max_state_dim"]),
        joint_every=int(config.get("self_attn_every_n_layers", 2)),
    )
