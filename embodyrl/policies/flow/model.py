"""What flow policies share: records of their inputs and states, the flow head, K Euler steps, the loss.

Convention of openpi: x_t = t * noise + (1 - t) * actions, velocity u = noise - actions; t = 1 is noise, t = 0 is data.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.flow.layers import Decoder, KeysValues, View, key_mask, positions_of, rotary
from embodyrl.policies.flow.siglip import SiglipTower
from embodyrl.policies.flow.specs import LONGEST_PERIOD, SHORTEST_PERIOD, FlowSpec

BACKBONE = ("vision", "projector", "language")
"""Attributes of the vision-language model; everything else is the action expert with its head."""
QUERY_SCALE = 3.0
"""How much larger the expert's random queries are than of variance 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowInputs:
    """One batch of observations, ready for the model."""

    images: Tensor
    """[B, C, 3, S, S] in -1..1, cameras in the order of training."""
    image_mask: Tensor
    """[B, C] bool, false where a camera is missing."""
    tokens: Tensor
    """[B, T] ids, padded right with any id."""
    token_mask: Tensor
    """[B, T] bool"""
    state: Tensor
    """[B, S] normalised, padded with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What the backbone makes of images and text: it depends on no weight of the expert, its head or projections."""

    layers: tuple[KeysValues, ...]
    """Keys and values of each language layer."""
    valid: Tensor
    """[B, P] bool: no padding."""
    state: Tensor
    """[B, S] as in the inputs."""
    hidden: Tensor | None = None
    """[B, P, D] after the language model's final norm, where it was asked for (values)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A prefix as the expert reads it: what is the same in every denoising step, made once."""

    views: tuple[View, ...]
    """One per expert layer."""
    state: Tensor
    """[B, S]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """One pass of the expert."""

    velocity: Tensor
    """[B, H, A] float32."""
    hidden: Tensor
    """[B, H, D] the action tokens' last hidden states."""


def time_embedding(time: Tensor, width: int, *, double: bool = False) -> Tensor:
    """Sine and cosine [B, D] of 2 pi t / period for times [B], D/2 periods from 4e-3 to 4 in geometric order.

    `double` computes the angles in float64 (lerobot); they reach 1571 rad, so that float32 (openpi's JAX code, and
    transformers) is 1e-4 rad away from it.
    """
    kind = torch.float64 if double else torch.float32
    share = torch.linspace(0.0, 1.0, width // 2, dtype=kind, device=time.device)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** share
    angle = time.to(kind)[:, None] * (1.0 / period * 2 * math.pi)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


class FlowModel(nn.Module, ABC):
    """Vision-language backbone, action expert and flow head. Compute: prefix once, memory once, denoise K times."""

    vision: SiglipTower
    projector: nn.Linear
    language: Decoder
    expert: Decoder

    def __init__(self, spec: FlowSpec, *, state_width: int, time_mlp: tuple[str, int]) -> None:
        """Make what all have; `state_width`: 0 or the width of the state's token.

        `time_mlp`: the stem of the names of the two layers that mix time in, and the inputs of the first.
        """
        super().__init__()
        self.spec = spec
        width = spec.expert.width
        self.vision = SiglipTower(spec.vision)
        self.action_in_proj = nn.Linear(spec.action_dim, width)
        self.action_out_proj = nn.Linear(width, spec.action_dim)
        if state_width:
            self.state_proj = nn.Linear(spec.state_dim, state_width)
        self._time_mlp, inputs = time_mlp
        self.add_module(f"{self._time_mlp}_in", nn.Linear(inputs, width))
        self.add_module(f"{self._time_mlp}_out", nn.Linear(width, width))

    @abstractmethod
    def embed_images(self, images: Tensor) -> Tensor:
        """Tokens [N, n, D] of images [N, 3, S, S], as the language model gets them."""

    @abstractmethod
    def memory(self, prefix: Prefix) -> Memory:
        """Prepare a prefix for the expert; here the expert's own weights begin."""

    @abstractmethod
    def embed_suffix(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, T, D] of noisy actions x [B, H, A] at times [B], the last H of them the actions'; condition."""

    def embed_prefix(self, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Embeddings [B, P, D] of all cameras, then of the text, and which of them are no padding [B, P]."""
        batch, cameras = inputs.image_mask.shape
        images = self.embed_images(inputs.images.flatten(0, 1)).unflatten(0, (batch, cameras))
        text = self.language.embed_tokens(inputs.tokens) * math.sqrt(self.spec.language.width)
        seen = inputs.image_mask[..., None].expand(-1, -1, images.shape[2]).flatten(1)
        return torch.cat([images.flatten(1, 2), text], dim=1), torch.cat([seen, inputs.token_mask], dim=1)

    def prefix(self, inputs: FlowInputs, *, output: bool = False) -> Prefix:
        """Run the backbone; `output` also wants its hidden states, which costs one more layer."""
        x, valid = self.embed_prefix(inputs)
        view = View(rotary(positions_of(valid), self.spec.language), key_mask(valid, valid if output else None))
        layers, hidden = self.language.remember(x, [view] * self.spec.language.depth, output=output)
        return Prefix(layers=layers, valid=valid, state=inputs.state, hidden=hidden)

    def denoise(self, memory: Memory, x: Tensor, time: Tensor) -> Denoised:
        """One pass of the expert.

        Args:
            memory: of B observations.
            x: [B, H, A] noisy actions.
            time: [B], or [1] if it is the same for all, which is cheaper.
        """
        tokens, condition = self.embed_suffix(memory, x.to(self.action_in_proj.weight.dtype), time)
        hidden = self.expert(tokens, memory.views, condition)[:, -self.spec.horizon :]
        return Denoised(velocity=self.action_out_proj(hidden).float(), hidden=hidden)

    def recompute_activations(self) -> None:
        """Store only the layers' inputs in the forward pass, and recompute the rest in the backward pass."""
        for stack in (self.vision, self.language, self.expert):
            stack.gradient_checkpointing = True

    def initialise(self, seed: int) -> None:
        """Start all weights anew: normal of variance 1 / inputs; biases and adaptive norms 0, plain norms identity.

        What is looked for must be found before anything else can be learned, so that a small model begins ready to
        look (measured in docs/flow.md): towers as in `SiglipTower.initialise`, open gates behind the expert's adaptive
        norms, queries of the expert that tell tokens apart and are not of the noise alone.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1 and "norm.dense" not in name:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn / math.sqrt(parameter[0].numel()))
                else:
                    scale = "norm" in name and name.endswith("weight") and "dense" not in name
                    offset = not name.startswith("vision") and self.spec.language.gemma
                    parameter.fill_(float(scale and not offset))
                if name.endswith("norm.dense.bias"):
                    parameter.view(3, -1)[2] = 1.0
                elif name.startswith("expert") and "q_proj" in name:
                    parameter.mul_(QUERY_SCALE)
            self.action_in_proj.bias.copy_(torch.randn(self.action_in_proj.bias.shape, generator=generator))
            self.vision.initialise(generator)

    def time_mlp(self, x: Tensor) -> Tensor:
        """Two layers, SiLU between them: [..., inputs] to [..., D]."""
        first, second = getattr(self, f"{self._time_mlp}_in"), getattr(self, f"{self._time_mlp}_out")
        return second(F.silu(first(x)))

    def _mix_time(self, actions: Tensor, time: Tensor) -> Tensor:
        """Noisy actions [B, H, D] beside the embedding of times [B or 1, D], through the MLP: [B, H, D]."""
        beside = time[:, None].to(actions.dtype).expand(len(actions), actions.shape[1], -1)
        return self.time_mlp(torch.cat([actions, beside], dim=-1))


def with_memory(view: View, layers: tuple[KeysValues, ...]) -> tuple[View, ...]:
    """The same view of each layer's keys and values."""
    return tuple(replace(view, memory=pair) for pair in layers)
