"""Llama-2 with attention over the whole sequence and no cache: one forward yields a whole action chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.openvla_oft.config import LlamaSpec


def rope_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables [positions, head_dim] of the half-split rotary embedding, always in float32.

    A table rounded to bfloat16 turns far positions by up to 0.4 rad and moves the logits visibly.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    angle = torch.outer(torch.arange(positions, device=device).float(), 1.0 / theta**exponent)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LlamaAttention(nn.Module):
    """Multi-head attention where every query sees every key that is not padding."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.heads = spec.num_heads
        width = spec.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], key_mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = rope[0].to(q.dtype), rope[1].to(q.dtype)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask[:, None, None, :])
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, width))


class LlamaMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(spec)
        self.mlp = LlamaMlp(spec)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], key_mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, key_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.head_dim = spec.hidden_size // spec.num_heads
        self.rope_theta = spec.rope_theta
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(spec) for _ in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, embeddings: Tensor, key_mask: Tensor) -> Tensor:
        """Map embeddings [B, T, D] at positions 0..T-1 to hidden states [B, T, D]; the final norm is the caller's.

        Args:
            embeddings: [B, T, D].
            key_mask: [B, T] bool, False where a position is padding and must not be attended to.
        """
        rope = rope_tables(embeddings.shape[1], self.head_dim, self.rope_theta, embeddings.device)
        x = embeddings
        for layer in self.layers:
            x = layer(x, rope, key_mask)
        return x


class LanguageModel(nn.Module):
    """The body and the untied output matrix."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.model = LlamaModel(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
