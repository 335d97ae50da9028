"""pi0 and pi0.5: PaliGemma, and an expert that shares its attention in every layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.flow.layers import Decoder, DecoderLayer, View, block_mask, key_mask, rotary
from embodyrl.policies.flow.model import FlowModel, Memory, Prefix, time_embedding, with_memory
from embodyrl.policies.flow.specs import Pi0Spec


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
