"""Parameters and memory of pi0, pi0.5 and SmolVLA. No torch."""

from embodyrl.policies.flow.specs import FlowSpec, LayersSpec, Pi0Spec
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.vla.adapter import lora_spec
from embodyrl.policies.vla.weights import count, weight_sizes
from embodyrl.types import PolicyCosts

_NETWORK = "embodyrl.policies.flow.vla.network"
_BACKBONE = ("vision.", "projector.", "language.")
_PROMPT_TOKENS = 48


def vla_costs(model: FlowSpec, cfg: VlaSettings) -> PolicyCosts:
    """Estimate size and memory of a model."""
    only = cfg.train_expert_only
    weights = weight_sizes(f"{_NETWORK}:{'Pi0' if isinstance(model, Pi0Spec) else 'SmolVla'}", model)
    expert = {name: weight for name, weight in weights.items() if not name.startswith(_BACKBONE)}
    trained = count(expert.values()) if only else None
    if cfg.is_lora:  # adapters on all layers, and the fully trained projections of the flow
        adapted = {name: weight for name, weight in weights.items() if name.startswith("expert.") or not only}
        adapted = {name: weight for name, weight in adapted.items() if name.startswith(("expert.", *_BACKBONE))}
        whole = count(weight for name, weight in expert.items() if not name.startswith("expert."))
        trained = whole + lora_spec(cfg).r * sum(weight.sides for weight in adapted.values() if weight.adaptable)
    kept = _activation_bytes(model, cfg.num_images_in_input, expert_only=only)
    return PolicyCosts(
        num_parameters=count(weights.values()), num_trained=trained, activation_bytes=kept, recomputed_bytes=kept // 10
    )


def _activation_bytes(model: FlowSpec, images: int, *, expert_only: bool) -> int:
    """Return the approximate bytes that a pass stores for the backward pass.

    Per token: 10 vectors of the width and 4 of the MLP.
    """
    kept = (model.horizon + 1) * _kept(model.expert)
    if not expert_only:
        vision = model.vision
        kept += (images * model.image_tokens + _PROMPT_TOKENS) * _kept(model.language)
        kept += images * vision.patches * vision.depth * (8 * vision.width + 2 * vision.mlp)
    return 4 * kept


def _kept(layers: LayersSpec) -> int:
    return layers.depth * (10 * layers.width + 4 * layers.mlp)
