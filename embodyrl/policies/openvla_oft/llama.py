"""Llama-2 for OpenVLA: full attention for action chunks, causal attention for single tokens.

Frozen linear layers with low-rank adapters are fused on a GPU. Plain PyTorch computes the frozen product, the adapter's
product and their sum one after the other, each with a pass over the output. If several layers have the same input,
autograd sums the input's gradients in one pass per layer. In `apply_linears`, the large product runs last and
accumulates into the existing output (`addmm_`), in the forward and in the backward pass, and the A factors of layers
with the same input are one matrix. Other layers are called normally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from embodyrl.policies.openvla_oft.config import LlamaSpec


def apply_linears(layers: Sequence[nn.Module], x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    """Return the output [..., out] of each linear layer for the same input x [..., in].

    `residual` [..., out] is added to the output of a single layer.
    """
    compute_dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if not x.is_cuda or not all(hasattr(layer, "lora_A") for layer in layers):
        out = [layer(x) for layer in layers]
        return out if residual is None else [residual + out[0]]
    if residual is not None and residual.dtype != compute_dtype:
        return [residual + apply_adapted_linears(layers, x.to(compute_dtype), None)[0]]
    return apply_adapted_linears(layers, x.to(compute_dtype), residual)


def apply_adapted_linears(layers: Sequence[Any], x: Tensor, residual: Tensor | None) -> list[Tensor]:
    """Return the outputs of `apply_linears` for layers with one peft adapter each, in the dtype of x."""
    parts: list[Tensor | None] = []
    scales = []
    for layer in layers:
        (name,) = layer.active_adapters
        base, low, high = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
        scales.append(layer.scaling[name])
        parts += [base.weight, base.bias, low.to(x.dtype), high.to(x.dtype)]
    start = None if residual is None else residual.flatten(0, -2)
    rows = _AdaptedLinears.apply(x.flatten(0, -2), start, tuple(scales), *parts)
    return [out.unflatten(0, x.shape[:-1]) for out in rows]


class _AdaptedLinears(torch.autograd.Function):
    """Autograd function that computes `residual + W x + b + s B A x` for several LoRA layers with the same input.

    W [out, in] and b [out] are frozen; A [r, in] and B [out, r] are the factors of the adapter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, scales: tuple[float, ...], *parts: Tensor) -> Any:
        weights, biases, lows, highs = (list(parts[i::4]) for i in range(4))
        factors = torch.cat(lows) if len(lows) > 1 else lows[0]
        low_outputs = x @ factors.t()
        sizes = [len(low) for low in lows]
        outs = []
        for weight, bias, high, scale, low in zip(
            weights, biases, highs, scales, low_outputs.split(sizes, 1), strict=True
        ):
            out = _scaled_matmul(low, high.t(), scale, bias if residual is None else residual)
            if bias is not None and residual is not None:
                out += bias
            outs.append(out.addmm_(x, weight.t()))
        ctx.save_for_backward(x, low_outputs, factors, *weights, *highs)
        ctx.scales, ctx.sizes, ctx.has_residual = scales, sizes, residual is not None
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, low_outputs, factors, *more = ctx.saved_tensors
        weights, highs = more[: len(grads)], more[len(grads) :]
        scaled_grads = [_scaled_matmul(g, high, s) for g, high, s in zip(grads, highs, ctx.scales, strict=True)]
        low_grads = torch.cat(scaled_grads, 1) if len(scaled_grads) > 1 else scaled_grads[0]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = low_grads @ factors
            for grad, weight in zip(grads, weights, strict=True):
                grad_x.addmm_(grad, weight)
        grad_lows = (low_grads.t() @ x).split(ctx.sizes)
        grad_highs = [
            _scaled_matmul(g.t(), low, s)
            for g, low, s in zip(grads, low_outputs.split(ctx.sizes, 1), ctx.scales, strict=True)
        ]
        grad_parts = [part for pair in zip(grad_lows, grad_highs, strict=True) for part in (None, None, *pair)]
        return grad_x, grads[0] if ctx.has_residual else None, None, *grad_parts


def _scaled_matmul(a: Tensor, b: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """Compute `residual + scale * a @ b` in one matrix product; without `residual`, only the product."""
    if residual is None:
        return (a @ b) if scale == 1.0 else torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)
    return torch.addmm(residual, a, b, alpha=scale)


Rope = tuple[Tensor, Tensor]


def build_rope_tables(positions: Tensor, head_dim: int, theta: float, *, bf16_frequencies: bool = False) -> Rope:
    """Return cosine and sine tables [B, 1, T, head_dim] of the rotary embedding at positions [B, T], float32.

    `bf16_frequencies` rounds the inverse frequencies, like code that casts the whole model with its buffers. The
    rotation of large positions then differs by up to 0.4 rad, which changes the logits noticeably.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    frequency = 1.0 / theta**exponent
    if bf16_frequencies:
        frequency = frequency.bfloat16().float()
    angle = positions[:, None, :, None].float() * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope[0].to(x.dtype), rope[1].to(x.dtype)
    if x.is_cuda or x.dtype == torch.float32:
        return _Rotation.apply(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Apply the rotation of `_rotate` in three kernels without copies; `sign` -1 rotates back."""
    out = x * cos
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out[..., :half].addcmul_(second, sin[..., :half], value=-sign)
    out[..., half:].addcmul_(first, sin[..., half:], value=sign)
    return out


class _Rotation(torch.autograd.Function):
    """Autograd function for rotary position embeddings; the backward pass applies the inverse rotation.

    Requires cosine and sine tables whose two halves are equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, sin, -1.0), None, None


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Select the rows with indices `rows` [B, R] from each batch entry of x [B or 1, T, ...]; return [B, R, ...]."""
    if len(x) == 1:
        return x[0][rows]
    begin = torch.arange(len(rows), device=rows.device)[:, None]
    if x.is_cuda:
        return x[begin, rows]
    # Selecting whole rows takes a third of the time in the forward and backward pass.
    return x.flatten(0, 1).index_select(0, (begin * x.shape[1] + rows).flatten()).unflatten(0, rows.shape)


def _select_positions(table: Tensor, rows: Tensor) -> Tensor:
    return select_rows(table[:, 0], rows)[:, None]


class KeyValueCache(dict[int, tuple[Tensor, Tensor]]):
    """Keys and values [B, heads, T, head_dim] of each layer."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values of a layer; return all keys and values."""
        if layer in self:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self[layer], (k, v), strict=True))
        self[layer] = k, v
        return k, v


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm to [..., D]; shape and dtype are unchanged."""
        if x.is_cuda and x.dtype == self.weight.dtype:
            # One kernel instead of eight; it sums in float32. Autocast would make float32 copies.
            with torch.autocast(x.device.type, enabled=False):
                return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if x.dtype == self.weight.dtype == torch.float32:
            return _RmsNorm.apply(x, self.weight, self.eps)
        x_float32 = x.float()
        x_float32 = x_float32 * torch.rsqrt(x_float32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x_float32.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """Autograd function w x / sqrt(mean x^2 + eps), with half the memory traffic of separate operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, weight = ctx.saved_tensors
        normal = x * scale
        rows = (normal * grads[0]).flatten(0, -2)
        mean = (rows @ weight).view_as(scale).div_(-x.shape[-1])
        return normal.mul_(mean).addcmul_(grads[0], weight).mul_(scale), rows.sum(0), None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Rotary tables, attention mask and optional key-value cache, shared by all layers."""

    rope: Rope
    mask: Tensor
    """[B, 1, 1 or T, keys] mask: bool (True: the query attends to the key), or float (added to the logits)."""
    cache: KeyValueCache | None = None


@dataclass(frozen=True, slots=True)
class RepeatedTokens:
    """Deduplicated inputs of the first layer: the S distinct tokens among T tokens.

    Zero tokens are identical at all positions, because their queries and keys are zero, also after the rotation.
    """

    positions: Tensor
    """[B, S] positions of the S distinct tokens."""
    mask: Tensor
    """[B, 1, 1, S] float mask of the first layer: the logarithm of each key's multiplicity, -inf for absent keys."""
    distinct_index: Tensor
    """[B, T] index of each token among the S distinct tokens."""


class LlamaAttention(nn.Module):
    """Multi-head attention with the mask of an `AttentionPlan`."""

    def __init__(self, spec: LlamaSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.hidden_size // spec.num_attention_heads
        width = spec.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, residual: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Return `residual` plus the attention output of tokens x [B, T, D], or only of the tokens at `rows` [B, R]."""
        rope, mask = plan.rope, plan.mask
        if rows is not None:  # queries of other tokens are skipped, but keys and values of all tokens are needed
            (q,) = apply_linears([self.q_proj], select_rows(x, rows))
            k, v = apply_linears([self.k_proj, self.v_proj], x)
            rope = (_select_positions(rope[0], rows), _select_positions(rope[1], rows))
            if mask.shape[2] > 1:  # a separate mask for every query
                mask = select_rows(mask[:, 0], rows)[:, None]
        else:
            q, k, v = apply_linears([self.q_proj, self.k_proj, self.v_proj], x)
        q, k, v = _rotate(self._split_heads(q), rope), _rotate(self._split_heads(k), plan.rope), self._split_heads(v)
        if plan.cache is not None:
            k, v = plan.cache.extend(self.layer, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return apply_linears([self.o_proj], out.transpose(1, 2).flatten(2), residual)[0]

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class LlamaMlp(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the MLP output of x [..., D] to `residual` [..., D]."""
        gate, up = apply_linears([self.gate_proj, self.up_proj], x)
        return apply_linears([self.down_proj], F.silu(gate) * up, residual)[0]


class LlamaLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, spec: LlamaSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(spec, layer)
        self.mlp = LlamaMlp(spec)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Map hidden states [B, T, D] to [B, T, D], or to [B, R, D] if only the positions `rows` [B, R] are needed."""
        x = self.self_attn(self.input_layernorm(x), x if rows is None else select_rows(x, rows), plan, rows)
        return self.mlp(self.post_attention_layernorm(x), x)


class LlamaModel(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, spec: LlamaSpec, *, rope_bf16_table: bool = False) -> None:
        super().__init__()
        self.head_dim = spec.hidden_size // spec.num_attention_heads
        self.rope_theta = spec.rope_theta
        self.rope_bf16_table = rope_bf16_table
        self.gradient_checkpointing = False
        # Not initialized here: on the meta device, that would import torch's compiler, which takes a second or two.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(spec.vocab_size, spec.hidden_size), freeze=False)
        self.layers = nn.ModuleList(LlamaLayer(spec, i) for i in range(spec.num_hidden_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        embeddings: Tensor,
        mask: Tensor,
        *,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        repeated: RepeatedTokens | None = None,
    ) -> Tensor:
        """Map embeddings [B, T, D] to hidden states after the final norm.

        Args:
            embeddings: [B, T, D], or [B, S, D] with `repeated`.
            mask: [B, 1, 1 or T, keys] bool, False for masked keys.
            rows: [B, R] indices of the required tokens; the last layer skips the queries and the MLP of other tokens.
            positions: [B, T]; default 0..T-1.
            cache: keys and values of earlier tokens, extended by this call.
            repeated: identical tokens, which the first of several layers computes once; not supported with a cache.

        Returns:
            [B, R, D], or [B, T, D] without `rows`.
        """
        if positions is None:
            positions = torch.arange(mask.shape[-1], device=embeddings.device)[None]
        plan = first = AttentionPlan(self._build_rope(positions, embeddings), mask, cache)
        if repeated is not None:
            assert len(self.layers) > 1, "a single layer cannot use repeated tokens"
            first = AttentionPlan(self._build_rope(repeated.positions, embeddings), repeated.mask)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        x = embeddings
        for layer in self.layers:
            # Only the last layer can skip rows: the layer above any other layer needs keys and values of all tokens.
            layer_rows = rows if layer is self.layers[-1] else None
            layer_plan = first if layer is self.layers[0] else plan
            x = (
                checkpoint(layer, x, layer_plan, layer_rows, use_reentrant=False)
                if recompute
                else layer(x, layer_plan, layer_rows)
            )
            if repeated is not None and layer_plan is first:
                x = select_rows(x, repeated.distinct_index)
        return self.norm(x)

    def _build_rope(self, positions: Tensor, embeddings: Tensor) -> Rope:
        rope = build_rope_tables(positions, self.head_dim, self.rope_theta, bf16_frequencies=self.rope_bf16_table)
        if embeddings.is_cuda and torch.is_autocast_enabled("cuda"):  # cast once, not in every layer
            rope = (rope[0].to(torch.get_autocast_dtype("cuda")), rope[1].to(torch.get_autocast_dtype("cuda")))
        return rope


class LanguageModel(nn.Module):
    """Llama language model: decoder and untied output matrix."""

    def __init__(self, spec: LlamaSpec, *, rope_bf16_table: bool = False) -> None:
        super().__init__()
        self.model = LlamaModel(spec, rope_bf16_table=rope_bf16_table)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
