"""Key-value cache with reserved space, so that appending a token does not copy the keys and values of all tokens."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from embodyrl.errors import CheckpointError, one_line
from embodyrl.specs import PolicyCosts

_MIN_RESERVED = 32
"""Minimum number of tokens for which space is reserved; long caches reserve a quarter of their length."""


class ReservedLayer(DynamicLayer):
    """Preallocated keys and values [B, heads, T, D] of one layer.

    Gradients are not supported, because new tokens are written in place.
    """

    def __init__(self, max_tokens: int) -> None:
        """Create an empty layer that reserves space for at most `max_tokens` tokens."""
        super().__init__()
        self._max_tokens = max_tokens
        self._reserved: tuple[Tensor, Tensor] | None = None
        self._filled: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, t, D]; return all keys and values, as views of the reserved space."""
        old_length, length = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if not old_length:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None
        assert self.values is not None
        # `batch_select_indices` replaces `self.keys`; the reserved space is outdated then.
        if self._reserved is None or self.keys is not self._filled or length > self._reserved[0].shape[-2]:
            size = max(length, min(self._max_tokens, length + max(_MIN_RESERVED, length // 4)))
            self._reserved = _extend(self.keys, size), _extend(self.values, size)
        for reserved, new in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[..., old_length:length, :] = new
        self.keys, self.values = (reserved[..., :length, :] for reserved in self._reserved)
        self._filled = self.keys
        return self.keys, self.values


def _extend(old: Tensor, size: int) -> Tensor:
    """Return a copy of a tensor [..., t, D] with space for `size` tokens."""
    new = old.new_empty(*old.shape[:-2], size, old.shape[-1])
    new[..., : old.shape[-2], :] = old
    return new


def create_reserved_cache(config: Any, max_tokens: int) -> DynamicCache:
    """Return an empty cache for a model's config, with reserved space in all full-attention layers.

    Other layers, such as sliding-window attention, are unchanged.
    """
    cache = DynamicCache(config=config)
    cache.layers = [ReservedLayer(max_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


_MAX_DISTANCE = {False: 1e-3, True: 0.5}
"""Maximum total variation distance between next-token distributions with and without a cache, by `uses_bf16`. Rounding
in bfloat16 can change the experts that process a token."""


@torch.no_grad()
def check_cache(model: Any, tokens: Sequence[int], *, uses_bf16: bool) -> None:
    """Check that a KV cache and left padding do not change the next-token probabilities of a language model.

    Args:
        model: the `LanguageModel`.
        tokens: ids of six text tokens.
        uses_bf16: True if the model computes in bfloat16.

    Raises:
        CheckpointError: the probabilities differ, or the model has a recurrent state or another kind of cache.
    """
    device = next(model.parameters()).device
    *prompt, last = torch.tensor(tokens, device=device)
    ids = torch.stack([torch.stack([prompt[0]] * 3 + prompt[:2]), torch.stack(prompt)])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    swap = torch.tensor([1, 0], device=device)
    try:
        positions, cache = model.positions(ids, mask, {}), create_reserved_cache(model.lm.config, len(tokens))
        model(ids, mask, positions, 1, cache)
        cache.reorder_cache(swap)  # type: ignore[arg-type]
        longer_mask = torch.cat([mask[swap], mask.new_ones(2, 1)], 1)
        cached, _ = model(last.expand(2, 1), longer_mask, positions[swap, -1:] + 1, 1, cache)
        full_rows = [torch.cat([row, last[None]])[None] for row in (ids[0, 3:], ids[1])]
        uncached = torch.cat([model.lm(input_ids=row, use_cache=False).logits[:, -1].float() for row in full_rows])
        distance = float((cached[:, 0].softmax(-1) - uncached[swap].softmax(-1)).abs().sum(-1).max()) / 2
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        distance, reason = None, one_line(error).rstrip(".")
    else:
        reason = f"the probabilities of the next token differ by {distance:.2g} from those without a cache"
    if distance is None or not distance <= _MAX_DISTANCE[uses_bf16]:
        raise CheckpointError(
            f"Models of the type '{model.lm.config.model_type}' do not support generation with a KV cache and padded "
            f"prompts: {reason}. Use a model with attention or hybrid layers, or rollout.backend=vllm."
        )


_M_MMAP_THRESHOLD = -3


def configure_malloc() -> None:
    """Configure malloc to return freed blocks of at least `PolicyCosts.MAPPED_BYTES` to the system.

    glibc (2.36) does not reuse a freed aligned block for a block of the same size, so a forward and backward pass of a
    language model would need up to twice the memory of its tensors. Returning smaller blocks as well would save this
    memory, but the kernel zeroes each returned page before its next use: a quarter more time on a CPU.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, PolicyCosts.MAPPED_BYTES)
