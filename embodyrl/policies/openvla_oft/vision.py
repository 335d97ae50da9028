"""Two vision towers and the projector in plain PyTorch, with the parameter names of the published checkpoints."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodyrl.policies.openvla_oft.config import VitSpec
from embodyrl.policies.openvla_oft.llama import apply_linears

LAYER_NORM_EPS = 1e-6


class PatchEmbed(nn.Module):
    """Patch embedding: a convolution without overlap; patches are in row order."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, spec.width, spec.patch_size, stride=spec.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [B, 3, S, S] to tokens [B, patches, width]."""
        if pixels.is_cuda or not isinstance(self.proj, nn.Conv2d):  # with an adapter it is not a Conv2d
            return self.proj(pixels).flatten(2).transpose(1, 2)
        # On a CPU, the equivalent matrix product takes two thirds of the time.
        size = self.proj.weight.shape[-1]
        rows, columns = (side // size for side in pixels.shape[2:])
        blocks = pixels[:, :, : rows * size, : columns * size].unflatten(3, (columns, size)).unflatten(2, (rows, size))
        patches = blocks.permute(0, 2, 4, 1, 3, 5).reshape(len(pixels), rows * columns, -1)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Full self-attention with a fused qkv projection."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.proj = nn.Linear(spec.width, spec.width)

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention output [B, T, width] before the output projection."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(batch, tokens, width)


class Mlp(nn.Module):
    """MLP with GELU, used in the towers and to project proprioception and noisy actions."""

    def __init__(self, inputs: int, hidden: int, outputs: int, *, approximate: str = "none") -> None:
        """Build the layers; `approximate`: none for exact GELU, or tanh."""
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)
        self._approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.fc2(F.gelu(self.fc1(x), approximate=self._approximate))


class LayerScale(nn.Module):
    """Learned factor per channel, called `scale_factor` in the checkpoints and `gamma` in timm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape."""
        return x * self.scale_factor


class LayerNorm(nn.LayerNorm):
    """Layer norm that avoids autocast's float32 copies on a GPU, where the kernel itself sums in float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=LAYER_NORM_EPS)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., width] to the same shape."""
        if input.is_cuda and input.dtype == self.weight.dtype:
            with torch.autocast(input.device.type, enabled=False):
                return super().forward(input)
        return super().forward(input)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.norm1 = LayerNorm(spec.width)
        self.attn = Attention(spec)
        self.ls1 = LayerScale(spec.width) if spec.layer_scale else nn.Identity()
        self.norm2 = LayerNorm(spec.width)
        self.mlp = Mlp(spec.width, spec.mlp_hidden, spec.width)
        self.ls2 = LayerScale(spec.width) if spec.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        x = _add_scaled(x, self.attn.proj, self.attn.attend(self.norm1(x)), self.ls1)
        return _add_scaled(x, self.mlp.fc2, F.gelu(self.mlp.fc1(self.norm2(x))), self.ls2)


def _add_scaled(x: Tensor, layer: nn.Module, inputs: Tensor, scale: nn.Module) -> Tensor:
    """Return x + scale(layer(inputs)), computed with fewer kernels on a GPU."""
    if not isinstance(scale, LayerScale):
        return apply_linears([layer], inputs, x)[0]
    out = layer(inputs)
    return torch.addcmul(x, out, scale.scale_factor) if x.is_cuda and x.dtype == out.dtype else x + scale(out)


class AttentionPool(nn.Module):
    """Weights of SigLIP's attention pooling, which OpenVLA does not use but every checkpoint contains."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.empty(1, 1, spec.width))
        self.q = nn.Linear(spec.width, spec.width)
        self.kv = nn.Linear(spec.width, 2 * spec.width)
        self.proj = nn.Linear(spec.width, spec.width)
        self.norm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(spec.width, spec.mlp_hidden, spec.width)


class Vit(nn.Module):
    """Vision tower. Its features are the patch tokens of the second-to-last block, without the final norm."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.num_prefix = spec.num_prefix
        self.gradient_checkpointing = False
        if spec.class_token:
            self.cls_token = nn.Parameter(torch.empty(1, 1, spec.width))
        if spec.reg_tokens:
            self.reg_token = nn.Parameter(torch.empty(1, spec.reg_tokens, spec.width))
        self.pos_embed = nn.Parameter(torch.empty(1, spec.num_patches, spec.width))
        self.patch_embed = PatchEmbed(spec)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        if spec.attn_pool:
            self.attn_pool = AttentionPool(spec)
        for name, parameter in self.named_parameters():
            # Weights that do not influence the output are excluded from the optimizer, but saved in checkpoints.
            unused = name.startswith((f"blocks.{spec.depth - 1}.", "norm.", "attn_pool."))
            parameter.requires_grad_(not unused)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map normalized pixels [B, 3, S, S] to [B, patches, width]."""
        x = self.patch_embed(pixels) + self.pos_embed
        # Prefix tokens are added after the position embeddings, because they have none (timm's `no_embed_class`).
        prefix = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        if prefix:
            x = torch.cat([*(p.expand(len(x), -1, -1) for p in prefix), x.to(prefix[0].dtype)], dim=1)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for block in self.blocks[:-1]:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x[:, self.num_prefix :]


class VisionBackbone(nn.Module):
    """DINOv2 and SigLIP with concatenated features."""

    def __init__(self, towers: tuple[VitSpec, VitSpec]) -> None:
        super().__init__()
        self.featurizer = Vit(towers[0])
        self.fused_featurizer = Vit(towers[1])

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [B, 6*images, S, S] to features of both towers [B, images*patches, summed width].

        The six channels of an image are three for DINOv2, then three for SigLIP.
        """
        batch, channels, height, width = pixels.shape
        single = pixels.reshape(batch * channels // 6, 6, height, width)
        dino, siglip = self.featurizer(single[:, :3]), self.fused_featurizer(single[:, 3:])
        return torch.cat([dino, siglip], dim=-1).reshape(batch, -1, dino.shape[-1] + siglip.shape[-1])


class Projector(nn.Module):
    """Three linear layers that map the vision width to the language width, with exact GELU in between."""

    def __init__(self, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., vision width] to [..., language width]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))
