"""Sizes of flow policies: the published sizes, and the sizes in a checkpoint's `config.json`.

The file may be in the format of openpi, LeRobot, transformers or embodyrl.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import LEROBOT_FIELDS, TRANSFORMERS_FIELDS, check_keys
from embodyrl.policies.vla.folder import CONFIG_FILE

MAX_DIM = 32
"""Width of states and actions in all published checkpoints; smaller states and actions are padded with zeros."""
SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0
"""Shortest and longest period of the sinusoidal time embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """Sizes of a SigLIP tower."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp: int

    @property
    def patches(self) -> int:
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersSpec:
    """Sizes of a stack of Gemma or Llama decoder layers."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    gemma: bool = True
    """True for Gemma: norms multiply by 1 + weight, MLPs use the tanh form of GELU. False for Llama: norms multiply by
    the weight, MLPs use SiLU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Common sizes of pi0, pi0.5 and SmolVLA."""

    vision: VisionSpec
    language: LayersSpec
    expert: LayersSpec
    vocab: int
    horizon: int = 50
    """H: number of actions per chunk."""
    action_dim: int = MAX_DIM
    state_dim: int = MAX_DIM

    @property
    def image_tokens(self) -> int:
        """Number of prefix tokens of one image."""
        return self.vision.patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Pi0Spec(FlowSpec):
    """Sizes of pi0 and pi0.5 (arXiv 2410.24164, 2504.16054; values from the openpi repository)."""

    adaptive: bool = False
    """True (pi0.5): the time conditions the expert's norms, and the state is text. False (pi0): the state is a suffix
    token, and the time is mixed into the action tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVlaSpec(FlowSpec):
    """Sizes of SmolVLA (arXiv 2506.01844; values from lerobot)."""

    shuffle: int = 4
    """Side of the square of patches that are merged into one token."""
    joint_every: int = 2
    """Layers with an index that is a multiple of this number use joint attention, all other layers cross-attention. 1:
    all layers use joint attention."""

    @property
    def image_tokens(self) -> int:
        """Number of prefix tokens of one image."""
        return self.vision.patches // self.shuffle**2


def compute_expert_mlp_width(width: int) -> int:
    """Return the width of SmolVLA's expert MLP: 4 * 2/3 of the width, rounded up to a multiple of 256."""
    return -(-4 * int(2 * width / 3) // 256) * 256


SO400M = VisionSpec(image_size=224, patch_size=14, width=1152, depth=27, heads=16, mlp=4304)
GEMMA_2B = LayersSpec(width=2048, depth=18, mlp=16384, heads=8, kv_heads=1, head_dim=256)
GEMMA_300M = LayersSpec(width=1024, depth=18, mlp=4096, heads=8, kv_heads=1, head_dim=256)
PALIGEMMA_VOCAB = 257152

PI0 = Pi0Spec(vision=SO400M, language=GEMMA_2B, expert=GEMMA_300M, vocab=PALIGEMMA_VOCAB)
PI05 = replace(PI0, adaptive=True)
SMOL_TEXT = LayersSpec(width=960, depth=16, mlp=2560, heads=15, kv_heads=5, head_dim=64, norm_eps=1e-5, gemma=False)
SMOLVLA = SmolVlaSpec(
    vision=VisionSpec(image_size=512, patch_size=16, width=768, depth=12, heads=12, mlp=3072),
    language=SMOL_TEXT,
    expert=replace(SMOL_TEXT, width=720, mlp=compute_expert_mlp_width(720)),
    vocab=49280,
)


SIZES_KEY = "embodyrl_flow"
_PERIODS = {"min_period": (SHORTEST_PERIOD,), "max_period": (LONGEST_PERIOD,)}
_LEROBOT = (
    *LEROBOT_FIELDS,
    *("empty_cameras", "freeze_vision_encoder", "max_action_dim", "max_state_dim", "tokenizer_max_length"),
    *("train_expert_only", "use_cache"),
)
_SMOLVLA = (
    *("expert_width_multiplier", "load_vlm_weights", "num_expert_layers", "num_steps", "num_vlm_layers"),
    # Padded tokens are masked.
    *("pad_language_to", "prefix_length", "self_attn_every_n_layers", "train_state_proj", "vlm_model_name"),
)
_PALIGEMMA = (
    *("action_dim", "action_expert_variant", "action_horizon", "discrete_state_input", "max_token_len"),
    *("num_inference_steps", "paligemma_variant", "pi05", "precision", "time_sampling_*"),
    # Compared with model.delta_dims and with the processors.
    *("action_feature_names", "relative_exclude_joints", "use_relative_actions"),
)
_TRANSFORMERS = (
    *TRANSFORMERS_FIELDS,
    *("chunk_size", "dit_config", "loss_reduction", "max_action_dim", "max_state_dim", "num_inference_steps"),
    *("time_sampling_*", "vlm_config"),
)
_VLM = (
    *TRANSFORMERS_FIELDS,
    *("hidden_size", "ignore_index", "image_token_id", "image_token_index", "num_image_tokens", "projection_dim"),
    *("text_config", "tie_word_embeddings", "vision_config", "vocab_size"),
)
_STACK = (
    *TRANSFORMERS_FIELDS,
    *("head_dim", "hidden_size", "image_size", "intermediate_size", "is_causal", "num_attention_heads"),
    *("num_hidden_layers", "num_image_tokens", "num_key_value_heads", "patch_size", "projection_dim", "rms_norm_eps"),
    *("tie_word_embeddings", "use_adarms", "use_bidirectional_attention", "vision_use_head", "vocab_size"),
)
_ROPE_THETA = 10_000.0
_SUPPORTED_STACK_VALUES = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "layer_norm_eps": (1e-6,),
    "num_channels": (3,),
    "rope_theta": (_ROPE_THETA,),
    "rope_parameters": ({"rope_theta": _ROPE_THETA, "rope_type": "default"},),
}
_KINDS: dict[str, type[FlowSpec]] = {"pi0": Pi0Spec, "smolvla": SmolVlaSpec}
_GEMMA = {"gemma_2b": GEMMA_2B, "gemma_300m": GEMMA_300M}
_SMOLVLM = "SmolVLM2-500M-"


def read_spec(folder: Path, *, adaptive: bool = False) -> FlowSpec:
    """Read the sizes from a checkpoint's config.json.

    Args:
        folder: folder with config.json.
        adaptive: True for pi0.5; openpi's files do not distinguish pi0 and pi0.5.

    Raises:
        CheckpointError: the file is missing or malformed, or describes an unsupported architecture.
    """
    where = folder / CONFIG_FILE
    with reject_malformed(where, "Use the config.json of a pi0, pi0.5 or SmolVLA checkpoint; download it again."):
        config = read_json(where)
        if SIZES_KEY in config:
            return _read_own(config[SIZES_KEY])
        if "vlm_config" in config:
            return _read_transformers(config, where)
        if config.get("type") == "smolvla":
            return _read_smolvla(config, where)
        kind = config.get("type", "pi05" if config.get("pi05", adaptive) else "pi0")
        return _read_paligemma(config, where, adaptive=kind == "pi05")


def _read_own(raw: Mapping[str, Any]) -> FlowSpec:
    fields = dict(raw)
    cls = _KINDS[fields.pop("kind")]
    vision = VisionSpec(**fields.pop("vision"))
    language, expert = (LayersSpec(**fields.pop(name)) for name in ("language", "expert"))
    return cls(vision=vision, language=language, expert=expert, **fields)


def _read_paligemma(config: Mapping[str, Any], where: Path, *, adaptive: bool) -> Pi0Spec:
    """Read the sizes of pi0 or pi0.5.

    Keys: openpi's (action_horizon, action_dim), or lerobot's (chunk_size, max_action_dim, max_state_dim).
    """
    supported = {"type": ("pi0", "pi05"), "image_resolution": ([224, 224],), "n_obs_steps": (1,), **_PERIODS}
    ignored = tuple(key for key in (*_LEROBOT, *_PALIGEMMA) if key != "type")
    check_keys(config, where, ignored=ignored, supported=supported)
    stacks = []
    for name in ("paligemma_variant", "action_expert_variant"):
        if config[name] not in _GEMMA:
            raise CheckpointError(
                f"{where}: {name}={config[name]} is not a known Gemma size ({', '.join(_GEMMA)}). "
                "Use another checkpoint."
            )
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


def _read_transformers(config: Mapping[str, Any], where: Path) -> Pi0Spec:
    text, vision = config["vlm_config"]["text_config"], config["vlm_config"]["vision_config"]
    check_keys(config, where, ignored=_TRANSFORMERS, supported=_PERIODS)
    check_keys(config["vlm_config"], f"{where}: vlm_config", ignored=_VLM)
    for name, stack in (("text_config", text), ("vision_config", vision), ("dit_config", config["dit_config"])):
        check_keys(stack, f"{where}: {name}", ignored=_STACK, supported=_SUPPORTED_STACK_VALUES)
    return Pi0Spec(
        vision=VisionSpec(**_read_sizes(vision, "image_size", "patch_size")),
        language=_read_layers(text),
        expert=_read_layers(config["dit_config"]),
        vocab=int(text["vocab_size"]),
        horizon=int(config["chunk_size"]),
        action_dim=int(config["max_action_dim"]),
        state_dim=int(config["max_state_dim"]),
    )


_TRANSFORMERS_NAMES = {
    "width": "hidden_size", "depth": "num_hidden_layers", "mlp": "intermediate_size", "heads": "num_attention_heads"
}  # fmt: skip


def _read_sizes(raw: Mapping[str, Any], *same_names: str) -> dict[str, Any]:
    """Return sizes in a transformers config by field name of the specs; `same_names` are equal in both."""
    return {
        local_name: int(raw[external_name])
        for local_name, external_name in (_TRANSFORMERS_NAMES | {name: name for name in same_names}).items()
    }


def _read_layers(raw: Mapping[str, Any]) -> LayersSpec:
    return LayersSpec(
        **_read_sizes(raw, "head_dim"),
        kv_heads=int(raw["num_key_value_heads"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
    )


def _read_smolvla(config: Mapping[str, Any], where: Path) -> SmolVlaSpec:
    """Read SmolVLA's sizes; LeRobot's file omits the backbone, which has the sizes of SmolVLM2-500M."""
    size = SMOLVLA.vision.image_size
    supported = {"attention_mode": ("cross_attn",), "n_obs_steps": (1,), "resize_imgs_with_padding": ([size, size],)}
    check_keys(config, where, ignored=(*_LEROBOT, *_SMOLVLA), supported=supported | _PERIODS)
    unsupported = {}
    layers = int(config.get("num_vlm_layers", SMOLVLA.language.depth))
    if (experts := int(config.get("num_expert_layers", -1))) not in (-1, 0, layers):
        unsupported["num_expert_layers"] = experts
    if (joint_every := int(config.get("self_attn_every_n_layers", SMOLVLA.joint_every))) < 1:
        unsupported["self_attn_every_n_layers"] = joint_every
    if _SMOLVLM not in str(config["vlm_model_name"]):
        unsupported["vlm_model_name"] = config["vlm_model_name"]
    if unsupported:
        raise CheckpointError(
            f"{where}: {unsupported} is not supported. Use SmolVLA on SmolVLM2-500M with num_expert_layers equal to "
            "num_vlm_layers, and self_attn_every_n_layers of at least 1."
        )
    language = replace(SMOLVLA.language, depth=layers)
    width = int(language.width * float(config.get("expert_width_multiplier", 0.75)))
    return replace(
        SMOLVLA,
        language=language,
        expert=replace(language, width=width, mlp=compute_expert_mlp_width(width)),
        horizon=int(config["chunk_size"]),
        action_dim=int(config["max_action_dim"]),
        state_dim=int(config["max_state_dim"]),
        joint_every=joint_every,
    )
