"""What training costs, derived from the configuration: trained parameters and stored activations."""

from __future__ import annotations

from embodyrl.config.schema import ModelConfig
from embodyrl.policies.openvla_oft.config import OftConfig

_PROMPT_WORDS = 40
"""Tokens of an instruction in its template, about."""


def adapter_parameters(cfg: ModelConfig, config: OftConfig) -> int:
    """Parameters of adapters on all linear layers: an upper bound for those with targets of their own."""
    llama = config.llama
    width, hidden = llama.hidden_size, llama.intermediate_size
    sides = llama.num_hidden_layers * (4 * 2 * width + 3 * (width + hidden)) + width + llama.vocab_size
    for vit in config.towers:
        sides += vit.depth * (4 * vit.width + 2 * vit.width + 2 * (vit.width + vit.mlp_hidden))
    both = sum(vit.width for vit in config.towers)
    sides += (both + 4 * both) + (4 * both + width) + 2 * width
    return cfg.lora.r * sides


def activation_bytes(cfg: ModelConfig, config: OftConfig, *, tokens_per_chunk: int, recompute: bool = False) -> int:
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
