"""Parameters, memory and FLOPs of OpenVLA-OFT. Does not import torch."""

from collections.abc import Mapping
from dataclasses import replace

from embodyrl.policies.openvla_oft.config import OftConfig, OftOptions
from embodyrl.policies.openvla_oft.settings import ActionHead
from embodyrl.policies.vla.adapter import get_lora_spec
from embodyrl.policies.vla.weights import WeightSize, count_parameters, get_weight_sizes
from embodyrl.types import PolicyCosts

PROMPT_TOKENS = 40
"""Approximate number of tokens of an instruction in its template."""


NETWORK = "embodyrl.policies.openvla_oft.model:OpenVlaOft"
_BODY = ("vision_backbone.", "projector.", "language_model.")
_LAYERS = "language_model.model.layers."
_VOCABULARY = ("language_model.model.embed_tokens.", "language_model.lm_head.")


def _estimate_sample_costs(
    config: OftConfig, weights: Mapping[str, WeightSize], *, images: int, tokens: int, uses_bf16: bool, adapters: bool
) -> PolicyCosts:
    """Return the memory and FLOPs of one sample, counted tensor by tensor.

    A layer with width D and MLP width M stores per token (`tests/fakegpu` measures the same sums):

    * In float32: 10 D + 4 M numbers in a Llama layer, 8 D + 2 M numbers in a ViT block.
    * In bfloat16 with adapters: the inputs and outputs of two norms, queries, keys, values and the attention output,
      and in the MLP gate, SiLU, up and product. The residual stream is bfloat16.
    * In bfloat16 without adapters: the same tensors, but the residual stream is float32, and autocast copies a norm's
      output for each linear layer.
    """
    llama, towers = config.llama, config.towers
    tokens += images * max(vit.num_patches for vit in towers) + PROMPT_TOKENS
    d, m = llama.hidden_size, llama.intermediate_size
    per_token, stream = (16 * d + 8 * m, 2) if adapters else (30 * d + 8 * m, 4)
    if not uses_bf16:
        per_token, stream = 4 * (10 * d + 4 * m), 4
    blocks = []
    for vit in towers:
        w, hidden = vit.width, vit.mlp_hidden
        block = (16 * w + 4 * hidden) if adapters else (24 * w + 4 * hidden)
        blocks.append(images * (vit.num_patches + vit.num_prefix) * (block if uses_bf16 else 4 * (8 * w + 2 * hidden)))
    inputs = sum(stream * v.depth * images * (v.num_patches + v.num_prefix) * v.width for v in towers)
    matrices = {name: weight for name, weight in weights.items() if weight.adaptable and weight.trained}
    language, vision = count_parameters(matrices, _LAYERS), count_parameters(matrices, "vision_backbone.", "projector.")
    attention = 2 * tokens**2 * d * llama.num_hidden_layers
    return PolicyCosts(
        activation_bytes=llama.num_hidden_layers * tokens * per_token
        + sum((v.depth - 1) * b for v, b in zip(towers, blocks, strict=True)),
        recomputed_bytes=llama.num_hidden_layers * tokens * stream * d + inputs,
        # Includes gradients of gate, SiLU, up, product and the inputs of the adapters or weights.
        largest_layer=(
            count_parameters(matrices, f"{_LAYERS}0."),
            max(tokens * (per_token + 12 * m * (1 if uses_bf16 else 2)), *blocks),
        ),
        # Gate, SiLU, up and product; embeddings, stream, a norm's output and the tables of positions.
        inference_bytes=tokens * ((8 * m + 3 * d) * (1 if uses_bf16 else 2) + 2 * stream * d),
        forward_flops=2.0 * (tokens * language + images * towers[0].num_patches * vision) + 2.0 * attention,
    )


def estimate_oft_costs(config: OftConfig, options: OftOptions) -> PolicyCosts:
    """Estimate parameters, memory and FLOPs of a model with the heads of `options`."""
    cfg, images, tokens = options.cfg, options.cfg.num_images_in_input, options.num_action_tokens
    repeated = cfg.action_head == ActionHead.diffusion and (cfg.every_step or cfg.is_residual)
    passes = cfg.num_diffusion_steps_inference if repeated else 1
    weights = get_weight_sizes(NETWORK, config, options)
    sample = _estimate_sample_costs(
        config, weights, images=images, tokens=tokens, uses_bf16=cfg.uses_bf16, adapters=cfg.is_lora
    )
    body = {name: weight for name, weight in weights.items() if name.startswith(_BODY)}
    heads = count_parameters(weights) - count_parameters(body)
    adapter_sides = sum(weight.fan_in_plus_fan_out for weight in body.values() if weight.adaptable and weight.trained)
    return replace(
        sample,
        num_parameters=count_parameters(weights),
        # Adapters on all layers (an upper bound for selected targets), and fully trained heads.
        num_trained=get_lora_spec(cfg).r * adapter_sides + heads if cfg.is_lora else None,
        activation_bytes=passes * sample.activation_bytes,
        recomputed_bytes=passes * sample.recomputed_bytes,
        outside_layers=count_parameters(body, "projector.", *_VOCABULARY) + heads,
        forward_flops=passes * sample.forward_flops,
        act_passes=cfg.action_dim if options.autoregressive else passes,
    )


def count_value_parameters(config: OftConfig, options: OftOptions) -> int:
    """Return the number of parameters of the value head."""
    return count_parameters(get_weight_sizes(NETWORK, config, options), "value_head.")
