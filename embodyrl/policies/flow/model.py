"""Modules shared by pi0, pi0.5 and SmolVLA: SigLIP tower, inputs, flow head.

Convention of openpi: x_t = t * noise + (1 - t) * actions, velocity u = noise - actions; t = 1 is noise, t = 0 is data.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodyrl.policies.flow.layers import (
    AttentionContext,
    Decoder,
    KeysValues,
    build_key_mask,
    build_rope,
    get_positions,
)
from embodyrl.policies.flow.specs import LONGEST_PERIOD, SHORTEST_PERIOD, FlowSpec, VisionSpec
from embodyrl.policies.openvla_oft.vision import Mlp

LAYER_NORM_EPS = 1e-6
CYCLES, CONTRAST = 4, 3.0
"""Parameters of the initial patch filters: number of cosines per direction, and scale."""


class SiglipEmbeddings(nn.Module):
    """Patch embedding with learned positions; patches are in row order."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, spec.width, spec.patch_size, stride=spec.patch_size)
        self.position_embedding = nn.Embedding(spec.patches, spec.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [N, 3, S, S] to patch embeddings [N, patches, width]."""
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        return patches + self.position_embedding.weight


class SiglipAttention(nn.Module):
    """Bidirectional self-attention over all patches."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.q_proj = nn.Linear(spec.width, spec.width)
        self.k_proj = nn.Linear(spec.width, spec.width)
        self.v_proj = nn.Linear(spec.width, spec.width)
        self.out_proj = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to the same shape."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SiglipBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.self_attn = SiglipAttention(spec)
        self.layer_norm2 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(spec.width, spec.mlp, spec.width, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(nn.Module):
    """SigLIP tower, which maps images in -1..1 to one feature vector per patch."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embeddings = SiglipEmbeddings(spec)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(SiglipBlock(spec) for _ in range(spec.depth))})
        self.post_layernorm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Initialize the weights for training from scratch.

        Position embeddings: sine and cosine of column and row, from a quarter period across the image to the highest
        frequency of the grid, with larger amplitudes at low frequencies. Patch filters: random mixtures of
        low-frequency cosines. Blocks start as the identity.
        """
        for block in self.encoder["layers"]:  # type: ignore[union-attr]
            assert isinstance(block, SiglipBlock)
            block.self_attn.out_proj.weight.zero_()
            block.mlp.fc2.weight.zero_()
        table = self.embeddings.position_embedding.weight
        side, count = math.isqrt(len(table)), table.shape[1] // 4
        offsets = torch.arange(side) - (side - 1) / 2
        frequencies = torch.logspace(-1, 0, count, base=float(side))
        angle, size = offsets[:, None] * math.pi / 2 * frequencies, 1 / frequencies
        encodings = torch.cat([angle.sin(), angle.cos()], 1) * (size / size.square().mean().sqrt()).repeat(2)
        grid = torch.cat([encodings.repeat(side, 1), encodings.repeat_interleave(side, 0)], 1)
        table[:, : grid.shape[1]] = grid.to(table)
        patch = self.embeddings.patch_embedding.weight
        wave = torch.arange(patch.shape[-1])
        cosines = torch.cos(math.pi * wave[:CYCLES, None] * (wave + 0.5) / len(wave))
        amplitudes = 1 / (1 + wave[:CYCLES, None] + wave[:CYCLES]) * (wave[:CYCLES, None] + wave[:CYCLES] < CYCLES)
        noise = torch.randn((*patch.shape[:2], *amplitudes.shape), generator=generator) * amplitudes
        filters = torch.einsum("ocij,ih,jw->ochw", noise, cosines, cosines)
        patch.copy_(CONTRAST * filters / filters.square().sum((1, 2, 3)).mean().sqrt())

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images [N, 3, S, S] to patch features [N, patches, width]."""
        x = self.embeddings(pixels)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for block in self.encoder["layers"]:  # type: ignore[union-attr]
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.post_layernorm(x)


BACKBONE = ("vision", "projector", "language")
"""Attributes of the vision-language model; all other attributes belong to the action expert and its head."""
QUERY_SCALE = 3.0
"""Scale of the action expert's random initial queries, relative to variance 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowInputs:
    """One batch of model inputs."""

    images: Tensor
    """[B, C, 3, S, S] images in -1..1, with the cameras in the order of training."""
    image_mask: Tensor
    """[B, C] bool, False for a missing camera."""
    tokens: Tensor
    """[B, T] token ids, padded on the right."""
    token_mask: Tensor
    """[B, T] bool; False for padding."""
    state: Tensor
    """[B, S] normalized state, padded with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Output of the backbone for images and text, which does not depend on the action expert."""

    layers: tuple[KeysValues, ...]
    """Keys and values of each language layer."""
    valid: Tensor
    """[B, P] bool, False for padding."""
    state: Tensor
    """[B, S] state of the inputs."""
    hidden: Tensor | None = None
    """[B, P, D] hidden states after the language model's final norm, if requested (for values)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Inputs of the action expert that do not change between denoising steps."""

    contexts: tuple[AttentionContext, ...]
    """Attention inputs of each expert layer, with keys and values of the prefix as memory."""
    state: Tensor
    """[B, S] normalized state."""


class DenoisingOutput(NamedTuple):
    """Outputs of one forward pass of the action expert."""

    velocity: Tensor
    """[B, H, A] velocity, float32."""
    hidden: Tensor
    """[B, H, D] the action tokens' last hidden states."""


def embed_time(time: Tensor, width: int, *, double: bool = False) -> Tensor:
    """Return the sinusoidal embedding [..., D] of times [...].

    The embedding contains sine and cosine of 2 pi t / period for D/2 geometrically spaced periods from 4e-3 to 4. With
    `double`, angles are computed in float64 (lerobot). Angles reach 1571 rad, where float32 (openpi's JAX code and
    transformers) has an error of 1e-4 rad.
    """
    dtype = torch.float64 if double else torch.float32
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=dtype, device=time.device)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** fraction
    angle = time.to(dtype)[..., None] * (1.0 / period * 2 * math.pi)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


class FlowModel(nn.Module, ABC):
    """Vision-language backbone, action expert and flow head. Only `denoise` runs once per Euler step."""

    vision: SiglipTower
    projector: nn.Linear
    language: Decoder
    expert: Decoder

    def __init__(self, spec: FlowSpec, *, state_width: int, time_mlp: tuple[str, int]) -> None:
        """Build the layers that all flow models share.

        Args:
            spec: sizes of the model.
            state_width: width of the state token; 0: no state token.
            time_mlp: name prefix of the two layers that embed time, and the input width of the first layer.
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
        """Return tokens [N, n, D] of images [N, 3, S, S] for the language model."""

    @abstractmethod
    def memory(self, prefix: Prefix) -> Memory:
        """Return the expert's inputs computed from a prefix: keys and values as memory, and the state."""

    @abstractmethod
    def embed_suffix(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return suffix tokens [B, T, D] and the condition of the adaptive norms, or None without adaptive norms.

        The last H tokens are the noisy actions x [B, H, A] at times [B].
        """

    def embed_prefix(self, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return embeddings [B, P, D] of all cameras and the text, and a mask [B, P], False for padding."""
        batch, cameras = inputs.image_mask.shape
        images = self.embed_images(inputs.images.flatten(0, 1)).unflatten(0, (batch, cameras))
        # Only text is scaled here; `embed_images` scales image tokens.
        text = self.language.embed_tokens(inputs.tokens) * math.sqrt(self.spec.language.width)
        image_mask = inputs.image_mask[..., None].expand(-1, -1, images.shape[2]).flatten(1)
        return torch.cat([images.flatten(1, 2), text], dim=1), torch.cat([image_mask, inputs.token_mask], dim=1)

    def prefix(self, inputs: FlowInputs, *, output: bool = False) -> Prefix:
        """Run the backbone on the prefix and return its key-value cache.

        If `output`, also run the rest of the last layer, and return the final hidden states.
        """
        x, valid = self.embed_prefix(inputs)
        context = AttentionContext(
            build_rope(get_positions(valid), self.spec.language), build_key_mask(valid, valid if output else None)
        )
        layers, hidden = self.language.compute_keys_values(x, [context] * self.spec.language.depth, output=output)
        return Prefix(layers=layers, valid=valid, state=inputs.state, hidden=hidden)

    def denoise(self, memory: Memory, x: Tensor, time: Tensor) -> DenoisingOutput:
        """Run one forward pass of the action expert.

        Args:
            memory: memory of B observations.
            x: [B, H, A] noisy actions.
            time: [B], or [1] for a common time, which is cheaper.
        """
        tokens, condition = self.embed_suffix(memory, x.to(self.action_in_proj.weight.dtype), time)
        # The last tokens are the actions; a state token may come first.
        hidden = self.expert(tokens, memory.contexts, condition)[:, -self.spec.horizon :]
        return DenoisingOutput(velocity=self.action_out_proj(hidden).float(), hidden=hidden)

    def recompute_activations(self) -> None:
        """Enable activation checkpointing: the backward pass recomputes all activations except the inputs of layers."""
        for stack in (self.vision, self.language, self.expert):
            stack.gradient_checkpointing = True

    def initialize(self, seed: int) -> None:
        """Initialize all weights: normal with variance 1 / fan_in.

        Biases and adaptive norms start at 0, plain norms at the identity. A small model learns faster if attention is
        useful at the start. Therefore vision towers are initialized by `SiglipTower.initialize`, gates after the
        expert's adaptive norms start open, and the expert's queries depend on the token and not only on the noise.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # Adaptive norms start at 0: otherwise they would scale by untrained values.
                if parameter.dim() > 1 and "norm.dense" not in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise / math.sqrt(parameter[0].numel()))
                else:
                    scale = "norm" in name and name.endswith("weight") and "dense" not in name
                    offset = not name.startswith("vision") and self.spec.language.gemma
                    # Gemma's norms multiply by 1 + weight, so 0 is the identity.
                    parameter.fill_(float(scale and not offset))
                if name.endswith("norm.dense.bias"):
                    parameter.view(3, -1)[2] = 1.0
                elif name.startswith("expert") and "q_proj" in name:
                    parameter.mul_(QUERY_SCALE)
            self.action_in_proj.bias.copy_(torch.randn(self.action_in_proj.bias.shape, generator=generator))
            self.vision.initialize(generator)

    def time_mlp(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., D] with two linear layers and SiLU between them."""
        first, second = getattr(self, f"{self._time_mlp}_in"), getattr(self, f"{self._time_mlp}_out")
        return second(F.silu(first(x)))

    def _mix_time(self, actions: Tensor, time: Tensor) -> Tensor:
        """Mix embedded times [B or 1, D] into noisy actions [B, H, D] with the time MLP."""
        time_tokens = time[:, None].to(actions.dtype).expand(len(actions), actions.shape[1], -1)
        return self.time_mlp(torch.cat([actions, time_tokens], dim=-1))
