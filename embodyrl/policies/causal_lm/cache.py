"""Key-value cache with reserved space, so that appending a token does not copy the keys and values of all tokens."""

import ctypes
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_MIN_RESERVED = 32
"""Minimum space reserved for further tokens; long caches reserve a quarter of their length."""


class ReservedLayer(DynamicLayer):
    """Preallocated keys and values [B, heads, T, D] of one layer.

    Gradients are not supported, because new tokens are written in place.
    """

    def __init__(self, longest: int) -> None:
        """Set up an empty layer; `longest`: maximum number of tokens, which limits the reserved space."""
        super().__init__()
        self._longest = longest
        self._space: tuple[Tensor, Tensor] | None = None
        self._filled: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, t, D]; return all keys and values, as views of the reserved space."""
        before, length = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if not before:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None
        assert self.values is not None
        # `batch_select_indices` replaces the keys.
        if self._space is None or self.keys is not self._filled or length > self._space[0].shape[-2]:
            size = max(length, min(self._longest, length + max(_MIN_RESERVED, length // 4)))
            self._space = _extended(self.keys, size), _extended(self.values, size)
        for space, new in zip(self._space, (key_states, value_states), strict=True):
            space[..., before:length, :] = new
        self.keys, self.values = (space[..., :length, :] for space in self._space)
        self._filled = self.keys
        return self.keys, self.values


def _extended(old: Tensor, size: int) -> Tensor:
    """Return a copy of a tensor [..., t, D] with space for `size` tokens."""
    new = old.new_empty(*old.shape[:-2], size, old.shape[-1])
    new[..., : old.shape[-2], :] = old
    return new


def reserved_cache(config: Any, longest: int) -> DynamicCache:
    """Return an empty cache for a model's config, with reserved space in all full-attention layers.

    Other layers, such as sliding-window attention, are unchanged.
    """
    cache = DynamicCache(config=config)
    cache.layers = [ReservedLayer(longest) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


_M_MMAP_THRESHOLD = -3


def unmap_large_tensors() -> None:
    """Configure malloc to return freed blocks of at least 128 KiB to the system.

    Used before passes with many large tensors.

    glibc (2.36) does not reuse a freed aligned block for a block of the same size, so a forward and backward pass of a
    language model would need up to twice the memory of its tensors.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**17)
