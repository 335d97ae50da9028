"""pi0 and pi0.5: PaliGemma, and an expert that shares its attention in every layer.

SmolVLA: the first layers of SmolVLM2, and an expert that attends jointly in some layers and across in the others.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.flow.layers import Decoder, DecoderLayer, KeysValues, View, block_mask, key_mask, rotary
from embodyrl.policies.flow.model import FlowModel, Memory, Prefix, time_embedding, with_memory
from embodyrl.policies.flow.specs import Pi0Spec, SmolVlaSpec


class Pi0(FlowModel):
    """pi0: the suffix is a state token, then the actions. pi0.5: the actions only, time through the norms."""

    spec: Pi0Spec

    def __init__(self, spec: Pi0Spec) -> None:
        width, adaptive = spec.expert.width, spec.adaptive
        time_mlp = ("time_mlp", width) if adaptive else ("action_time_mlp", 2 * width)
        super().__init__(spec, state_width=0 if adaptive else width, time_mlp=time_mlp)
        condition = width if adaptive else 0
        self.projector = nn.Linear(spec.vision.width, spec.language.width)
        self.language = Decoder(
            spec.language, [DecoderLayer(spec.language) for _ in range(spec.language.depth)], vocab=spec.vocab
        )
        self.expert = Decoder(
            spec.expert,
            [DecoderLayer(spec.expert, condition_width=condition) for _ in range(spec.expert.depth)],
            condition_width=condition,
        )

    def embed_images(self, images: Tensor) -> Tensor:
        """Unlike the text, they are not scaled."""
        return self.projector(self.vision(images))

    def memory(self, prefix: Prefix) -> Memory:
        """Every expert layer sees the language layer's keys and values; the state token does not see the actions."""
        # pi0's suffix begins with the token of the state.
        lead = 0 if self.spec.adaptive else 1
        size, device = lead + self.spec.horizon, prefix.valid.device
        blocks = (torch.arange(size, device=device) >= lead).long()
        past, own = key_mask(prefix.valid), block_mask(blocks)
        mask = torch.cat([past.expand(-1, -1, size, -1), own.expand(len(past), -1, -1, -1)], dim=-1)
        positions = prefix.valid.sum(1, keepdim=True) + torch.arange(size, device=device)
        view = View(rotary(positions, self.spec.expert), mask)
        return Memory(views=with_memory(view, prefix.layers), state=prefix.state)

    def embed_suffix(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """State and actions, or actions and the condition of the norms."""
        actions, when = self.action_in_proj(x), time_embedding(time, self.spec.expert.width)
        if self.spec.adaptive:
            return actions, F.silu(self.time_mlp(when.to(actions.dtype)))
        state = self.state_proj(memory.state.to(actions.dtype))[:, None]
        return torch.cat([state, self._mix_time(actions, when)], dim=1), None


class SmolVla(FlowModel):
    """The state is the prefix's last token; images and text do not see it. Actions see no later actions.

    So the state is no part of `Prefix`: its token passes the language model in `memory`, and its projection learns
    beside a frozen backbone without keeping what images and text went through.
    """

    spec: SmolVlaSpec

    def __init__(self, spec: SmolVlaSpec) -> None:
        text, width = spec.language, spec.expert.width
        super().__init__(spec, state_width=text.width, time_mlp=("action_time_mlp", 2 * width))
        self.projector = nn.Linear(spec.vision.width * spec.shuffle**2, text.width, bias=False)
        self.language = Decoder(text, [DecoderLayer(text) for _ in range(text.depth)], vocab=spec.vocab)
        kv_width = text.kv_heads * text.head_dim
        self.expert = Decoder(
            spec.expert,
            [DecoderLayer(spec.expert, kv_inputs=None if self._joint(i) else kv_width) for i in range(text.depth)],
        )

    def embed_images(self, images: Tensor) -> Tensor:
        """Patches in squares of s x s to one token each, row by row; scaled as the text is."""
        features, s = self.vision(images), self.spec.shuffle
        side = math.isqrt(features.shape[1])
        squares = features.unflatten(1, (side // s, s, side // s, s)).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.projector(squares) * math.sqrt(self.spec.language.width)

    def memory(self, prefix: Prefix) -> Memory:
        """Append the state's keys and values, and translate them where an expert layer attends across."""
        text, size, device = self.spec.language, self.spec.horizon, prefix.valid.device
        valid = torch.cat([prefix.valid, prefix.valid.new_ones(len(prefix.valid), 1)], dim=1)
        past, count = key_mask(valid), valid.sum(1, keepdim=True)
        state = View(rotary(count - 1, text), past)
        layers = self._append_state(prefix, state)
        steps = torch.arange(size, device=device)
        own = block_mask(steps).expand(len(past), -1, -1, -1)
        joint = View(
            rotary(count + steps, self.spec.expert), torch.cat([past.expand(-1, -1, size, -1), own], dim=-1)
        )  # fmt: skip
        # Positions of their own, from 0; keys translated from the other stack are not rotated again.
        across = View(rotary(steps[None], self.spec.expert), past, among=False)
        views = []
        for i, (layer, pair) in enumerate(zip(self.expert.layers, layers, strict=True)):
            view = joint if self._joint(i) else across
            seen = pair if self._joint(i) else layer(None, pair)[1]
            views.append(View(view.rope, view.mask, seen, view.among))
        return Memory(views=tuple(views), state=prefix.state)

    def embed_suffix(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Actions mixed with time; angles in float64 as in the public code."""
        when = time_embedding(time, self.spec.expert.width, double=True)
        return self._mix_time(self.action_in_proj(x), when), None

    def _append_state(self, prefix: Prefix, view: View) -> tuple[KeysValues, ...]:
        """Let the state's token see images and text; return the keys and values of all three."""
        token = self.state_proj(prefix.state.to(self.state_proj.weight.dtype))[:, None]
        views = [View(view.rope, view.mask, pair) for pair in prefix.layers]
        own, _ = self.language.remember(token, views)
        return tuple(
            (torch.cat([past_k, k.to(past_k.dtype)], dim=2), torch.cat([past_v, v.to(past_v.dtype)], dim=2))
            for (past_k, past_v), (k, v) in zip(prefix.layers, own, strict=True)
        )

    def _joint(self, layer: int) -> bool:
        return layer % self.spec.joint_every == 0
