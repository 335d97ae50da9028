"""Parameters and memory of pi0, pi0.5 and SmolVLA, from their config files. No torch."""

from dataclasses import dataclass
from typing import Self

from embodyrl.policies.flow.specs import FlowSpec, LayersSpec, Pi0Spec, SmolVlaSpec, VisionSpec
from embodyrl.policies.flow.vla.settings import VlaSettings
from embodyrl.policies.vla.adapter import lora_spec
from embodyrl.types import PolicyCosts

_PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of parameters, without RL heads."""

    model: FlowSpec
    backbone: int
    expert: int
    """Number of parameters of the expert, including the projections of states, actions and time."""

    @classmethod
    def of(cls, model: FlowSpec) -> Self:
        """Count the parameters of a model."""
        text, expert = model.language, model.expert
        adaptive = isinstance(model, Pi0Spec) and model.adaptive
        projector = _projector(model)
        backbone = _vision(model.vision) + projector + model.vocab * text.width + text.width
        backbone += text.depth * _layer(text, text.width, 0)
        kv_width, condition = text.kv_heads * text.head_dim, expert.width if adaptive else 0
        flow = _norm(expert, condition)
        for i in range(expert.depth):
            across = isinstance(model, SmolVlaSpec) and i % model.joint_every != 0
            flow += _layer(expert, kv_width if across else expert.width, condition)
        w = expert.width
        flow += model.action_dim * w + w + w * model.action_dim + model.action_dim
        flow += (w if adaptive else 2 * w) * w + w + w * w + w
        if not adaptive:
            out = text.width if isinstance(model, SmolVlaSpec) else w
            flow += model.state_dim * out + out
        return cls(model=model, backbone=backbone, expert=flow)

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.backbone + self.expert

    def adapters(self, rank: int, *, expert_only: bool) -> int:
        """Return the approximate number of parameters of adapters on all linear layers and of fully trained modules."""
        stacks = (self.model.expert,) if expert_only else (self.model.expert, self.model.language)
        sides = sum(
            s.depth * (4 * s.width + 2 * (s.heads + s.kv_heads) * s.head_dim + 3 * (s.width + s.mlp)) for s in stacks
        )
        if not expert_only:
            v = self.model.vision
            sides += v.depth * (9 * v.width + 2 * v.mlp + v.width)
        w = self.model.expert.width
        return rank * sides + 3 * w * w + 3 * self.model.action_dim * w

    def activation_bytes(self, images: int, *, expert_only: bool) -> int:
        """Return the approximate bytes that a forward pass stores for the backward pass.

        Per token: 10 vectors of the width and 4 of the MLP.
        """
        model = self.model
        kept = (model.horizon + 1) * _kept(model.expert)
        if not expert_only:
            vision = model.vision
            kept += (images * model.image_tokens + _PROMPT_TOKENS) * _kept(model.language)
            kept += images * vision.patches * vision.depth * (8 * vision.width + 2 * vision.mlp)
        return 4 * kept


def _kept(layers: LayersSpec) -> int:
    return layers.depth * (10 * layers.width + 4 * layers.mlp)


def _projector(model: FlowSpec) -> int:
    if isinstance(model, SmolVlaSpec):
        return model.vision.width * model.shuffle**2 * model.language.width
    return (model.vision.width + 1) * model.language.width


def _vision(v: VisionSpec) -> int:
    block = 4 * (v.width + 1) * v.width + (v.width + 1) * v.mlp + (v.mlp + 1) * v.width + 4 * v.width
    return (3 * v.patch_size**2 + 1) * v.width + v.patches * v.width + v.depth * block + 2 * v.width


def _norm(layers: LayersSpec, condition: int) -> int:
    return 3 * layers.width * (condition + 1) if condition else layers.width


def _layer(layers: LayersSpec, kv_inputs: int, condition: int) -> int:
    heads, kv = layers.heads * layers.head_dim, layers.kv_heads * layers.head_dim
    attention = 2 * layers.width * heads + 2 * kv_inputs * kv
    return attention + 3 * layers.width * layers.mlp + 2 * _norm(layers, condition)


def vla_costs(model: FlowSpec, cfg: VlaSettings) -> PolicyCosts:
    """Estimate size and memory of a model."""
    sizes, only = Sizes.of(model), cfg.train_expert_only
    lora = sizes.adapters(lora_spec(cfg).r, expert_only=only) if cfg.is_lora else None
    kept = sizes.activation_bytes(cfg.num_images_in_input, expert_only=only)
    return PolicyCosts(
        num_parameters=sizes.total,
        num_trained=lora if lora is not None else sizes.expert if only else None,
        activation_bytes=kept,
        recomputed_bytes=kept // 10,
    )
