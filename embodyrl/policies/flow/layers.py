"""Decoder layers in the style of Gemma and Llama, for language models and action experts.

Attention is split along the masks: the prefix does not attend to the suffix, so its keys and values are computed once
(`Decoder.compute_keys_values`), and later tokens attend to them and to each other (`AttentionContext.memory`). The
result equals one attention over the concatenated tokens, as in the published code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodyrl.policies.flow.specs import LayersSpec
from embodyrl.policies.openvla_oft.llama import Rope, build_rope_tables

ROPE_THETA = 10000.0
MASKED_SCORE = -2.3819763e38
"""Score added to masked keys; finite in bfloat16 too, so that a fully masked query averages all values, as in
openpi."""

KeysValues = tuple[Tensor, Tensor]
"""Keys (rotated) and values of one layer, each [B, kv_heads, T, head_dim]."""


def build_key_mask(valid: Tensor, queries: Tensor | None = None) -> Tensor:
    """Return an additive attention mask [B, 1, 1 or Q, T] that excludes keys where `valid` [B, T] is false.

    A query for which `queries` [B, Q] is false attends to nothing.
    """
    visible = valid[:, None, None, :]
    if queries is not None:
        visible = visible & queries[:, None, :, None]
    return torch.zeros(visible.shape, device=valid.device).masked_fill_(~visible, MASKED_SCORE)


def build_block_mask(blocks: Tensor) -> Tensor:
    """Return an additive attention mask [1, 1, T, T]: token i attends to j if blocks[j] <= blocks[i]."""
    masked = blocks[None, :] > blocks[:, None]
    return torch.zeros(masked.shape, device=blocks.device).masked_fill_(masked, MASKED_SCORE)[None, None]


def get_positions(valid: Tensor) -> Tensor:
    """Return positions [B, T] of tokens; padding is not counted."""
    return valid.long().cumsum(1) - 1


def build_rope(positions: Tensor, spec: LayersSpec) -> Rope:
    """Return cosine and sine tables of the half-split rotary embedding at positions [B, T]."""
    return build_rope_tables(positions, spec.head_dim, ROPE_THETA)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply the rotary embedding to [B, heads, T, head_dim] in float32."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32; with a condition, adaRMS: scale, shift and gate are linear in the condition.

    adaRMS: y = norm(x) * (1 + scale) + shift, and the sublayer's output is multiplied by the gate (pi0.5).
    """

    def __init__(self, spec: LayersSpec, condition_width: int = 0) -> None:
        super().__init__()
        self.eps, self.offset = spec.norm_eps, 1.0 if spec.gemma else 0.0
        if condition_width:
            self.dense = nn.Linear(condition_width, 3 * spec.width)
        else:
            self.weight = nn.Parameter(torch.empty(spec.width))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return normalized x [B, T, width] and the gate; the gate is None without a condition [B, D] or [B, T, D]."""
        x_float32 = x.float()
        x_float32 = x_float32 * torch.rsqrt(x_float32.square().mean(-1, keepdim=True) + self.eps)
        if condition is None:
            return (x_float32 * (self.offset + self.weight.float())).to(x.dtype), None
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return torch.addcmul(shift.float(), x_float32, 1.0 + scale.float()).to(x.dtype), gate


class Attention(nn.Module):
    """Grouped-query attention. Keys and values are computed from `kv_inputs` features (default: the tokens' width)."""

    def __init__(self, spec: LayersSpec, kv_inputs: int | None = None) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        kv_inputs, kv_width = kv_inputs or spec.width, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.width, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(kv_inputs, kv_width, bias=False)
        self.v_proj = nn.Linear(kv_inputs, kv_width, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.width, bias=False)

    def keys_values(self, x: Tensor, rope: Rope) -> KeysValues:
        """Return keys and values of tokens [B, T, width]."""
        return _rotate(self._split_heads(self.k_proj(x)), rope), self._split_heads(self.v_proj(x))

    def project_keys_values(self, memory: KeysValues) -> KeysValues:
        """Return keys and values, projected from the rotated keys and values of a layer of another decoder."""
        keys, values = (x.transpose(1, 2).flatten(2) for x in memory)
        return self._split_heads(self.k_proj(keys)), self._split_heads(self.v_proj(values))

    def attend(self, x: Tensor, rope: Rope, keys_values: KeysValues, mask: Tensor) -> Tensor:
        """Attend from tokens [B, T, width] to keys and values under a mask [B or 1, 1, 1 or T, keys]."""
        q, (k, v) = _rotate(self._split_heads(self.q_proj(x)), rope), keys_values
        # Use the dtype of the memory, which may differ, for example after a frozen decoder in bfloat16.
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(v.dtype), enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GatedMlp(nn.Module):
    """Gated MLP: GeGLU (Gemma) or SwiGLU (Llama)."""

    def __init__(self, spec: LayersSpec) -> None:
        super().__init__()
        self.gemma = spec.gemma
        self.gate_proj = nn.Linear(spec.width, spec.mlp, bias=False)
        self.up_proj = nn.Linear(spec.width, spec.mlp, bias=False)
        self.down_proj = nn.Linear(spec.mlp, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to tokens [..., width]."""
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Attention inputs of one forward pass through a layer: positions, mask and earlier keys and values."""

    rope: Rope
    """Rotary tables at the tokens' positions."""
    mask: Tensor
    """[B or 1, 1, 1 or T, keys] attention mask."""
    memory: KeysValues | None = None
    """Keys and values of earlier tokens, prepended to the keys and values of the current tokens."""
    self_attention: bool = True
    """True if the tokens also attend to each other; False if they only attend to the memory."""


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer. All calls use `forward`, because FSDP gathers the weights of a layer there."""

    def __init__(self, spec: LayersSpec, *, condition_width: int = 0, kv_inputs: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(spec, kv_inputs)
        self.mlp = GatedMlp(spec)
        self.input_layernorm = RmsNorm(spec, condition_width)
        self.post_attention_layernorm = RmsNorm(spec, condition_width)

    def forward(
        self,
        x: Tensor | None,
        context: AttentionContext | KeysValues,
        condition: Tensor | None = None,
        *,
        output: bool = True,
    ) -> tuple[Tensor | None, KeysValues | None]:
        """Map tokens [B, T, width] to the same shape; also return the keys and values of these tokens, or None.

        Without `output`, return only the keys and values. Without tokens, `context` contains keys and values of another
        decoder, and this layer returns projections of those keys and values.
        """
        if not isinstance(context, AttentionContext):
            return None, self.self_attn.project_keys_values(context)
        assert x is not None
        normed, gate = self.input_layernorm(x, condition)
        own_kv, attended_kv = None, context.memory
        if context.self_attention:
            # Only the tokens' own keys and values, also with a memory: the caller may store them as a memory.
            own_kv = attended_kv = self.self_attn.keys_values(normed, context.rope)
            if not output:
                return None, own_kv
            if context.memory is not None:
                (past_k, past_v), (k, v) = context.memory, own_kv
                attended_kv = torch.cat([past_k.to(k.dtype), k], dim=2), torch.cat([past_v.to(v.dtype), v], dim=2)
        assert attended_kv is not None, "tokens that do not attend to each other need a memory"
        x = _add(x, self.self_attn.attend(normed, context.rope, attended_kv, context.mask), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _add(x, self.mlp(normed), gate), own_kv


def _add(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return x + update if gate is None else x + update * gate


class Decoder(nn.Module):
    """Decoder layers and a final norm; with token embeddings if `vocab` is given."""

    def __init__(
        self, spec: LayersSpec, layers: list[DecoderLayer], *, vocab: int = 0, condition_width: int = 0
    ) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing = False
        if vocab:
            self.embed_tokens = nn.Embedding(vocab, spec.width)
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(spec, condition_width)

    def forward(self, x: Tensor, contexts: Sequence[AttentionContext], condition: Tensor | None = None) -> Tensor:
        """Map tokens [B, T, width] to the hidden states after the final norm; `contexts` has one element per layer."""
        for layer, context in zip(self.layers, contexts, strict=True):
            x, _ = self._run(layer, x, context, condition)
        return self.norm(x, condition)[0]

    def compute_keys_values(
        self, x: Tensor, contexts: Sequence[AttentionContext], *, output: bool = False
    ) -> tuple[tuple[KeysValues, ...], Tensor | None]:
        """Return keys and values of each layer for tokens [B, T, width], and hidden states or None.

        Hidden states [B, T, width] are returned with `output`, which adds the last layer's attention and MLP.
        """
        keys_values: list[KeysValues] = []
        for number, (layer, context) in enumerate(zip(self.layers, contexts, strict=True), 1):
            x, layer_kv = self._run(layer, x, context, None, output=output or number < len(contexts))
            keys_values.append(layer_kv)
        return tuple(keys_values), self.norm(x)[0] if output else None

    def _run(
        self, layer: nn.Module, x: Tensor, context: AttentionContext, condition: Tensor | None, *, output: bool = True
    ) -> Any:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, x, context, condition, output=output, use_reentrant=False)
        return layer(x, context, condition, output=output)
