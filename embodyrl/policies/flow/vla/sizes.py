"""Parameters and memory of pi0, pi0.5 and SmolVLA. Does not import torch."""

from embodyrl.policies.flow.specs import FlowSpec, LayersSpec, Pi0Spec
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.vla.adapter import get_lora_spec
from embodyrl.policies.vla.weights import count_parameters, get_weight_sizes
from embodyrl.types import PolicyCosts

_NETWORK_MODULE = "embodyrl.policies.flow.vla.network"
_BACKBONE = ("vision.", "projector.", "language.")
_PROMPT_TOKENS = 48
_BYTES_PER_ELEMENT = 2.5
"""Average bytes per stored activation element under autocast, which stores most in bfloat16 and some in float32."""


def estimate_costs(model: FlowSpec, cfg: VlaSettings) -> PolicyCosts:
    """Estimate the number of parameters and the activation memory of a model."""
    expert_only = cfg.train_expert_only
    weights = get_weight_sizes(f"{_NETWORK_MODULE}:{'Pi0' if isinstance(model, Pi0Spec) else 'SmolVla'}", model)
    outside_backbone = count_parameters(weights) - count_parameters(weights, *_BACKBONE)
    trained = outside_backbone if expert_only else None
    if cfg.is_lora:  # adapters on all layers, and the fully trained projections of the flow
        layers = ("expert.", *(() if expert_only else _BACKBONE))
        adapted = [w for name, w in weights.items() if w.adaptable and name.startswith(layers)]
        adapters = get_lora_spec(cfg).r * sum(w.fan_in_plus_fan_out for w in adapted)
        trained = outside_backbone - count_parameters(weights, "expert.") + adapters
    elements = _count_activations(model, cfg)
    activation_bytes = int((_BYTES_PER_ELEMENT if cfg.uses_bf16 else 4) * elements)
    return PolicyCosts(
        num_parameters=count_parameters(weights),
        num_trained=trained,
        activation_bytes=activation_bytes,
        recomputed_bytes=activation_bytes // 6,
    )


def _count_activations(model: FlowSpec, cfg: VlaSettings) -> int:
    """Return the approximate number of activation elements stored per sample for the backward pass.

    Each layer stores 10 vectors of the model's width and 4 of the MLP's width per token; each expert layer also stores
    keys and values of all tokens, once per pass of the expert. tests/fakegpu/rows.py measures these numbers.
    """
    expert, vision, suffix, images = model.expert, model.vision, model.horizon + 1, cfg.num_images_in_input
    prefix = images * model.image_tokens + _PROMPT_TOKENS
    total = suffix * _count_layer_activations(expert)
    total += expert.depth * (prefix + suffix) * 2 * expert.heads * expert.head_dim
    total *= cfg.scored_passes
    if not cfg.train_expert_only:
        total += prefix * _count_layer_activations(model.language)
        total += images * vision.patches * vision.depth * (8 * vision.width + 2 * vision.mlp)
    return total


def _count_layer_activations(layers: LayersSpec) -> int:
    return layers.depth * (10 * layers.width + 4 * layers.mlp)
