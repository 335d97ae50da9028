"""SigLIP as PaliGemma and SmolVLM use it: all blocks, then the final norm, no pooling; names of the public checkpoints.

Not the tower of OpenVLA-OFT, which follows timm: fused qkv, exact GELU, and the output of the last but one block.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodyrl.policies.flow.specs import VisionSpec

LAYER_NORM_EPS = 1e-6
CYCLES, CONTRAST = 4, 3.0
"""Of random patches: cosines in each direction, and the size of a filter."""


class SiglipEmbeddings(nn.Module):
    """Patches and their learned positions: [N, 3, S, S] to [N, patches, width], row by row."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, spec.width, spec.patch_size, stride=spec.patch_size)
        self.position_embedding = nn.Embedding(spec.patches, spec.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed pixels [N, 3, S, S]."""
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        return patches + self.position_embedding.weight


class SiglipAttention(nn.Module):
    """Full self-attention."""

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


class SiglipMlp(nn.Module):
    """Linear, the tanh form of GELU, linear."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.fc1 = nn.Linear(spec.width, spec.mlp)
        self.fc2 = nn.Linear(spec.mlp, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to the same shape."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SiglipBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.self_attn = SiglipAttention(spec)
        self.layer_norm2 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.mlp = SiglipMlp(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(nn.Module):
    """Images in -1..1 to one feature vector per patch."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embeddings = SiglipEmbeddings(spec)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(SiglipBlock(spec) for _ in range(spec.depth))})
        self.post_layernorm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Places: sine and cosine of column and row, from a quarter of a wave across the image to the finest of a grid.

        The longer the wave, the larger it is: a place is mostly read off the long ones. Patches are read by random
        mixes of their slowest cosines, as colours and slopes; blocks add nothing to what they are given.
        """
        for block in self.encoder["layers"]:  # type: ignore[union-attr]
            assert isinstance(block, SiglipBlock)
            block.self_attn.out_proj.weight.zero_()
            block.mlp.fc2.weight.zero_()
        table = self.embeddings.position_embedding.weight
        side, count = math.isqrt(len(table)), table.shape[1] // 4
        places = torch.arange(side) - (side - 1) / 2
        finest = torch.logspace(-1, 0, count, base=float(side))
        angle, size = places[:, None] * math.pi / 2 * finest, 1 / finest
        waves = torch.cat([angle.sin(), angle.cos()], 1) * (size / size.square().mean().sqrt()).repeat(2)
        both = torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, 0)], 1)
        table[:, : both.shape[1]] = both.to(table)
        patch = self.embeddings.patch_embedding.weight
        wave = torch.arange(patch.shape[-1])
        cosines = torch.cos(math.pi * wave[:CYCLES, None] * (wave + 0.5) / len(wave))
        shares = 1 / (1 + wave[:CYCLES, None] + wave[:CYCLES]) * (wave[:CYCLES, None] + wave[:CYCLES] < CYCLES)
        drawn = torch.randn((*patch.shape[:2], *shares.shape), generator=generator) * shares
        mixed = torch.einsum("ocij,ih,jw->ochw", drawn, cosines, cosines)
        patch.copy_(CONTRAST * mixed / mixed.square().sum((1, 2, 3)).mean().sqrt())

    def forward(self, pixels: Tensor) -> Tensor:
        """Map [N, 3, S, S] to [N, patches, width]."""
        x = self.embeddings(pixels)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for block in self.encoder["layers"]:  # type: ignore[union-attr]
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.post_layernorm(x)
