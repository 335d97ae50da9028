"""The JSON files of a public OpenVLA-OFT checkpoint as frozen records; imports nothing heavy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft.settings import OftSettings
from embodyrl.policies.openvla_oft.statistics import STATISTICS_FILE, Statistics
from embodyrl.registry import closest

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer.json"
INDEX_FILE = "model.safetensors.index.json"
TINY_VIT_FILE = "tiny_vit_specs.json"
RANDOM_INIT_KEY = "embodyrl_init"
VALUE_HIDDEN = (512, 128)

_KNOWN_VITS: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": {
        "patch_size": 14, "embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0,
        "class_token": True, "reg_tokens": 4, "init_values": 1e-5, "global_pool": "token",
    },
    "vit_so400m_patch14_siglip_224": {
        "patch_size": 14, "embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362,
        "class_token": False, "reg_tokens": 0, "init_values": None, "global_pool": "map",
    },
}  # fmt: skip

_LLAMA_ONLY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


_PROMPT_WORDS = 40
"""Tokens of an instruction in its template, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitSpec:
    """One vision tower."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_hidden: int
    class_token: bool
    reg_tokens: int
    layer_scale: bool
    attn_pool: bool
    """The checkpoint holds an (unused) attention pool."""

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_prefix(self) -> int:
        return int(self.class_token) + self.reg_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec:
    """The language model, under the names of its config, where transformers stores only what differs from these."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_token_id: int = 1
    eos_token_id: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelNorm:
    """Normalisation of one tower's pixels in 0..1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OftOptions:
    """What the run decides beside the checkpoint's own files."""

    num_action_chunks: int
    action_dim: int
    action_head: str = "discrete"
    autoregressive: bool = False
    """OpenVLA: one action, token by token under a causal mask; false: all tokens at once, every query sees all keys."""
    append_stop: bool = True
    """Put the STOP token after the action placeholders; without meaning where `autoregressive`."""
    state_dim: int = 0
    """Width of the proprioception; 0: not used."""
    use_film: bool = False
    rope_bf16_table: bool = False
    value_dim: int = 0

    @property
    def num_action_tokens(self) -> int:
        return self.num_action_chunks * self.action_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class OftConfig:
    """Everything that the JSON files of a checkpoint folder say."""

    folder: Path
    towers: tuple[VitSpec, VitSpec]
    """DINOv2 first, then SigLIP: the order of the image channels."""
    pixel_norms: tuple[PixelNorm, PixelNorm]
    llama: LlamaSpec
    pad_token_id: int
    action_vocab_end: int
    """Vd: one past the highest action id; rows above pad the embedding table."""
    n_bins: int
    statistics: Statistics
    random_init: bool
    """The folder asks for random initial weights instead of holding some."""

    @property
    def image_size(self) -> int:
        return self.towers[0].image_size

    @property
    def action_vocab_start(self) -> int:
        """Lowest action id."""
        return self.action_vocab_end - self.n_bins

    @property
    def num_parameters(self) -> int:
        """Parameters of the checkpoint, the value head excluded."""
        return sum(map(_vit_parameters, self.towers)) + _projector_parameters(self) + _llama_parameters(self.llama)


def read_config(folder: Path) -> OftConfig:
    """Read config.json, preprocessor_config.json and dataset_statistics.json of a checkpoint folder.

    Raises:
        CheckpointError: a file or field is missing, malformed, or asks for an architecture that this is not.
    """
    try:
        return _parse(folder)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"A JSON file in {folder} has a field of the wrong type ({error!r}). Take {CONFIG_FILE}, "
            f"{PREPROCESSOR_FILE}, {STATISTICS_FILE} and {TINY_VIT_FILE} from one repository."
        ) from error


def _parse(folder: Path) -> OftConfig:
    config = _read_json(folder / CONFIG_FILE)
    where = folder / CONFIG_FILE
    ids = _field(config, "timm_model_ids", where)
    sizes = _field(config, "image_sizes", where)
    if len(ids) != 2 or len(set(sizes)) != 1:
        raise CheckpointError(
            f"{where}: timm_model_ids {ids} with image_sizes {sizes}; OpenVLA-OFT has two vision towers of one image "
            f"size (DINOv2 and SigLIP). This is another model; pick an OpenVLA-OFT checkpoint."
        )
    llama = _read_llama(_field(config, "text_config", where), where)
    statistics = folder / STATISTICS_FILE
    raw = _read_json(statistics) if statistics.exists() else _field(config, "norm_stats", where)
    return OftConfig(
        folder=folder,
        towers=(_read_vit(ids[0], sizes[0], folder), _read_vit(ids[1], sizes[1], folder)),
        pixel_norms=_read_pixel_norms(folder),
        llama=llama,
        pad_token_id=int(_field(config, "pad_token_id", where)),
        action_vocab_end=llama.vocab_size - int(_field(config, "pad_to_multiple_of", where)),
        n_bins=int(_field(config, "n_action_bins", where)),
        statistics=Statistics(raw, folder),
        random_init=config.get(RANDOM_INIT_KEY) == "random",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing. The folder is not a checkpoint in the public OpenVLA-OFT layout, or its download is "
            f"incomplete; fetch the whole repository again."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fetch the file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object. Fetch the file again.")
    return content


def _field(data: Mapping[str, Any], name: str, where: Path) -> Any:
    if name not in data:
        raise CheckpointError(
            f"{where} has no field '{name}'.{closest(name, data)} It is not of an OpenVLA-OFT checkpoint, or cut off; "
            f"fetch it again."
        )
    return data[name]


def _read_llama(text: Mapping[str, Any], where: Path) -> LlamaSpec:
    values: dict[str, Any] = {f.name: type(f.default)(text.get(f.name, f.default)) for f in fields(LlamaSpec)}
    spec = LlamaSpec(**values)
    expected = {**_LLAMA_ONLY, "num_key_value_heads": spec.num_attention_heads}
    for name, only in expected.items():
        if text.get(name, only) != only:
            raise CheckpointError(
                f"{where}: text_config.{name} is {text[name]!r}; OpenVLA-OFT's Llama-2 has {only!r}. "
                f"This language model is not supported; pick a checkpoint with a Llama-2 backbone."
            )
    return spec


def _read_vit(name: str, image_size: int, folder: Path) -> VitSpec:
    known = dict(_KNOWN_VITS)
    if (folder / TINY_VIT_FILE).exists():
        known |= _read_json(folder / TINY_VIT_FILE)
    if name not in known:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: unknown vision tower '{name}'.{closest(name, known)} Known: {', '.join(known)}; "
            f"others need their dimensions in {TINY_VIT_FILE} beside config.json."
        )
    spec = known[name]
    return VitSpec(
        image_size=image_size,
        patch_size=spec["patch_size"],
        width=spec["embed_dim"],
        depth=spec["depth"],
        heads=spec["num_heads"],
        mlp_hidden=int(spec["embed_dim"] * spec["mlp_ratio"]),
        class_token=spec["class_token"],
        reg_tokens=spec["reg_tokens"],
        layer_scale=spec["init_values"] is not None,
        attn_pool=spec["global_pool"] == "map",
    )


def _read_pixel_norms(folder: Path) -> tuple[PixelNorm, PixelNorm]:
    """Prefer `tvf_normalize_params`: they are what the processor of the public code really applies."""
    where = folder / PREPROCESSOR_FILE
    data = _read_json(where)
    params = data.get("tvf_normalize_params")
    means = [p["mean"] for p in params] if params else _field(data, "means", where)
    stds = [p["std"] for p in params] if params else _field(data, "stds", where)
    if [len(x) for x in (*means, *stds)] != [3] * 4:
        raise CheckpointError(f"{where}: wants mean and std of three channels for two towers. Fetch the file again.")
    first, second = (PixelNorm(mean=tuple(m), std=tuple(s)) for m, s in zip(means, stds, strict=True))
    return first, second


def _vit_parameters(vit: VitSpec) -> int:
    w, h = vit.width, vit.mlp_hidden
    mlp = 2 * w * h + h + w
    block = 4 * w + 4 * w * (w + 1) + mlp + (2 * w if vit.layer_scale else 0)
    pool = w + 4 * w * (w + 1) + 2 * w + mlp if vit.attn_pool else 0
    embed = w * (3 * vit.patch_size**2 + 1) + w * (vit.num_patches + vit.num_prefix)
    return embed + vit.depth * block + 2 * w + pool


def _projector_parameters(config: OftConfig) -> int:
    vision, llm = sum(t.width for t in config.towers), config.llama.hidden_size
    return 4 * vision * (vision + 1) + llm * (4 * vision + 1) + llm * (llm + 1)


def _llama_parameters(llama: LlamaSpec) -> int:
    w = llama.hidden_size
    layer = 4 * w * w + 3 * w * llama.intermediate_size + 2 * w
    return 2 * llama.vocab_size * w + llama.num_hidden_layers * layer + w


def count_parameters(config: OftConfig, options: OftOptions) -> int:
    """Parameters of the model with all its heads and projectors, adapters excluded."""
    width, state, values = config.llama.hidden_size, options.state_dim, options.value_dim
    square = width * (width + 1)
    total = config.num_parameters
    if state:
        total += width * (state + 1) + square
    if options.use_film:
        total += sum(vit.depth * 2 * vit.width * (width + 1) for vit in config.towers)
    if options.action_head != "discrete":
        rows, actions = options.action_dim * width, options.action_dim * (width + 1)
        total += 2 * rows + width * (rows + 1) + 2 * (2 * width + square) + 2 * width + actions
    if options.action_head == "diffusion":
        total += 2 * width + square
    if values:
        first, second = VALUE_HIDDEN
        total += first * (width + 1) + second * (first + 1) + second * values
    return total


def adapter_parameters(cfg: OftSettings, config: OftConfig) -> int:
    """Parameters of adapters on all linear layers: an upper bound for those with targets of their own."""
    llama = config.llama
    width, hidden = llama.hidden_size, llama.intermediate_size
    sides = llama.num_hidden_layers * (4 * 2 * width + 3 * (width + hidden)) + width + llama.vocab_size
    for vit in config.towers:
        sides += vit.depth * (4 * vit.width + 2 * vit.width + 2 * (vit.width + vit.mlp_hidden))
    both = sum(vit.width for vit in config.towers)
    sides += (both + 4 * both) + (4 * both + width) + 2 * width
    return cfg.lora.r * sides


def activation_bytes(cfg: OftSettings, config: OftConfig, *, tokens_per_chunk: int, recompute: bool = False) -> int:
    """Bytes that one sample's forward pass keeps for its backward pass.

    Per token and layer: 10 vectors of the width and 4 of the MLP in a Llama layer, 8 and 2 in a ViT block; with
    recomputation the layers' inputs, and all of the largest layer.
    """
    llama, images = config.llama, cfg.num_images_in_input
    patches = max(vit.num_patches for vit in config.towers)
    tokens = images * patches + _PROMPT_WORDS + tokens_per_chunk
    layer = tokens * (10 * llama.hidden_size + 4 * llama.intermediate_size)
    blocks = [images * vit.num_patches * (8 * vit.width + 2 * vit.mlp_hidden) for vit in config.towers]
    if recompute:
        kept = llama.num_hidden_layers * tokens * llama.hidden_size + max(layer, *blocks)
        return 4 * (kept + sum(v.depth * images * v.num_patches * v.width for v in config.towers))
    return 4 * (llama.num_hidden_layers * layer + sum(v.depth * b for v, b in zip(config.towers, blocks, strict=True)))
