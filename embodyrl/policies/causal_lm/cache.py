"""Key-value cache with reserved space, so that appending a token does not copy the keys and values of all tokens."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from embodyrl.errors import CheckpointError, one_line

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


_LARGEST_GAP = {False: 1e-3, True: 0.5}
"""Largest total variation distance of a model's next token with and without cache, by whether it computes in half
precision, whose rounding changes the experts of a token."""


@torch.no_grad()
def check_cache(net: Any, tokens: Sequence[int], *, half: bool) -> None:
    """Check that a language model continues padded prompts of a cache as it continues the same tokens without one.

    Args:
        net: the `LanguageModel`.
        tokens: six tokens that are not images.
        half: True if the model computes in half precision.

    Raises:
        CheckpointError: the probabilities differ, or the model has another kind of cache, as recurrent models have.
    """
    device = next(net.parameters()).device
    *prompt, last = torch.tensor(tokens, device=device)
    ids = torch.stack([torch.stack([prompt[0]] * 3 + prompt[:2]), torch.stack(prompt)])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    swapped = torch.tensor([1, 0], device=device)
    try:
        positions, cache = net.positions(ids, mask, {}), reserved_cache(net.lm.config, len(tokens))
        net(ids, mask, positions, 1, cache)
        cache.reorder_cache(swapped)  # type: ignore[arg-type]
        longer = torch.cat([mask[swapped], mask.new_ones(2, 1)], 1)
        cached, _ = net(last.expand(2, 1), longer, positions[swapped, -1:] + 1, 1, cache)
        whole = [torch.cat([row, last[None]])[None] for row in (ids[0, 3:], ids[1])]
        plain = torch.cat([net.lm(input_ids=row, use_cache=False).logits[:, -1].float() for row in whole])
        gap = float((cached[:, 0].softmax(-1) - plain[swapped].softmax(-1)).abs().sum(-1).max()) / 2
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        gap, reason = None, one_line(error).rstrip(".")
    else:
        reason = f"the probabilities of the next token differ by {gap:.2g} from those without a cache"
    if gap is None or not gap <= _LARGEST_GAP[half]:
        raise CheckpointError(
            f"Models of the type '{net.lm.config.model_type}' cannot generate replies with a cache of padded prompts: "
            f"{reason}. Use a model with attention or hybrid layers, or rollout.backend=vllm."
        )


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
