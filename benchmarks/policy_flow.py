"""Flow rows of `policy.py`: pi0 against transformers' own model and a plain implementation with the same weights.

`act` computes a chunk in ten steps, `score` a flow-matching loss with a backward pass through all weights, for two
cameras. The plain implementation runs the backbone again in each step, and uses the loss of embodyrl.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.policies.flow.layouts import TRANSFORMERS
from embodyrl.policies.flow.likelihood import integrate_ode
from embodyrl.policies.flow.model import FlowInputs
from embodyrl.policies.flow.specs import LayersSpec, Pi0Spec, VisionSpec
from embodyrl.policies.flow.vla.build import save_weights
from embodyrl.policies.flow.vla.network import Pi0

STEPS, CAMERAS, PROMPT = 10, 2, 32
PEERS = {
    "theirs": "transformers PI0ForConditionalGeneration",
    "plain": "plain: the backbone again in every step",
}
MEASURED = {"ours": ("act", "score"), "theirs": ("act", "score"), "plain": ("act",)}
SIZES = {
    "pi0-tiny": Pi0Spec(
        vision=VisionSpec(image_size=56, patch_size=14, width=64, depth=2, heads=4, mlp=128),
        language=LayersSpec(width=64, depth=2, mlp=128, heads=4, kv_heads=1, head_dim=16),
        expert=LayersSpec(width=32, depth=2, mlp=64, heads=4, kv_heads=1, head_dim=16),
        vocab=512,
        horizon=8,
    ),
    "pi0-90m": Pi0Spec(
        vision=VisionSpec(image_size=224, patch_size=14, width=384, depth=8, heads=6, mlp=1536),
        language=LayersSpec(width=640, depth=8, mlp=2560, heads=8, kv_heads=1, head_dim=80),
        expert=LayersSpec(width=320, depth=8, mlp=1280, heads=8, kv_heads=1, head_dim=80),
        vocab=8192,
    ),
}


class Side:
    """One implementation with its calls."""

    def __init__(self, side: str, spec: Pi0Spec, device: str, dtype: torch.dtype) -> None:
        self.spec, self.plain, self.measured = spec, side == "plain", MEASURED[side]
        ours = Pi0(spec)
        ours.initialize(0)
        self.theirs = _theirs(ours, spec).to(device, dtype) if side == "theirs" else None
        self.ours = ours.to(device, dtype)
        self.module: nn.Module = self.theirs or self.ours

    def inputs(self, batch: int) -> tuple[FlowInputs, Tensor, Tensor]:
        """Return observations, noise [B, H, D] and actions, the same for all sides."""
        spec, dtype = self.spec, self.ours.action_in_proj.weight.dtype
        drawn, device = torch.Generator().manual_seed(batch), self.ours.action_in_proj.weight.device

        def draw(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, generator=drawn).to(device, dtype)

        size = spec.vision.image_size
        observed = FlowInputs(
            images=draw(CAMERAS, 3, size, size).clamp(-1, 1),
            image_mask=torch.ones(batch, CAMERAS, dtype=torch.bool, device=device),
            tokens=torch.randint(1, spec.vocab, (batch, PROMPT), generator=drawn).to(device),
            token_mask=torch.ones(batch, PROMPT, dtype=torch.bool, device=device),
            state=draw(spec.state_dim),
        )
        chunk = spec.horizon, spec.action_dim
        return observed, draw(*chunk), draw(*chunk)

    def call(self, what: str, batch: int) -> Callable[[], Tensor]:
        """Run the measured call; return the actions, or the loss after its backward pass."""
        observed, noise, actions = self.inputs(batch)
        time = torch.full((batch,), 0.3, device=noise.device)
        if self.theirs is not None:
            asked, model = _asked(observed, self.spec), self.theirs
            if what == "act":
                return lambda: model.sample_actions(**asked, noise=noise.clone(), num_steps=STEPS)
            return lambda: _backward(model(**asked, noise=noise, timestep=time, actions=actions).loss)
        if what == "act":
            return lambda: self._act(observed, noise)
        return lambda: self._loss(observed, noise, actions, time)

    def _act(self, observed: FlowInputs, x: Tensor) -> Tensor:
        remembered = None if self.plain else self.ours.memory(self.ours.prefix(observed))

        def velocity(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            memory = self.ours.memory(self.ours.prefix(observed)) if remembered is None else remembered
            found = self.ours.denoise(memory, x, time)
            return found.velocity, found.hidden

        return integrate_ode(velocity, x.float(), STEPS)

    def _loss(self, observed: FlowInputs, noise: Tensor, actions: Tensor, time: Tensor) -> Tensor:
        t = time[:, None, None]
        memory = self.ours.memory(self.ours.prefix(observed))
        velocity = self.ours.denoise(memory, (t * noise + (1 - t) * actions).to(noise.dtype), time).velocity
        return _backward(nn.functional.mse_loss(velocity, (noise - actions).float()))


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def _theirs(ours: Pi0, spec: Pi0Spec) -> nn.Module:
    """Load transformers' model from a file with our weights."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    def gemma(layers: LayersSpec) -> dict:
        return {
            "model_type": "gemma", "hidden_size": layers.width, "num_hidden_layers": layers.depth,
            "intermediate_size": layers.mlp, "num_attention_heads": layers.heads,
            "num_key_value_heads": layers.kv_heads, "head_dim": layers.head_dim,
        }  # fmt: skip

    vision = {
        "model_type": "siglip_vision_model", "hidden_size": spec.vision.width, "intermediate_size": spec.vision.mlp,
        "num_hidden_layers": spec.vision.depth, "num_attention_heads": spec.vision.heads,
        "patch_size": spec.vision.patch_size, "image_size": spec.vision.image_size,
        "projection_dim": spec.language.width, "vision_use_head": False,
    }  # fmt: skip
    text = gemma(spec.language) | {"vocab_size": spec.vocab}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision}
    vlm |= {"projection_dim": spec.language.width, "image_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        save_weights(ours.state_dict(), Path(folder), TRANSFORMERS)
        PI0Config(vlm_config=vlm, dit_config=gemma(spec.expert), chunk_size=spec.horizon).save_pretrained(folder)
        model, info = PI0ForConditionalGeneration.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
        )
    assert not any(info.values()), info
    return model.eval()


def _asked(observed: FlowInputs, spec: Pi0Spec) -> dict[str, Tensor]:
    """Return a prompt of transformers, with a placeholder (token 0) for each image token."""
    images = observed.tokens.new_zeros(len(observed.tokens), CAMERAS * spec.image_tokens)
    ids = torch.cat([images, observed.tokens], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": observed.images,
        "pixel_attention_mask": observed.image_mask,
        "state": observed.state,
    }
