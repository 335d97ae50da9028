"""Hidden states of replies to repeated prompts; each distinct prompt is processed once in forward and backward."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from embodyrl.policies.causal_lm.model import LanguageModel
from embodyrl.policies.causal_lm.prompts import Prompt, pad_left
from embodyrl.policies.tensors import to_device
from embodyrl.specs import PolicyCosts


def is_sharing_cheaper(net: LanguageModel, prompts: Sequence[Prompt], longest: int) -> bool:
    """Return True if the model supports shared prompts, and sharing at least halves the number of computed tokens.

    Args:
        net: language model; not supported if sharded, because all ranks need the same number of forward passes.
        prompts: prompt of each reply; equal prompts are the same object.
        longest: number of tokens of the longest reply.
    """
    width, unique = max(map(len, prompts)), len({id(p) for p in prompts})
    num_computed = unique * width + len(prompts) * (longest - 1)
    if num_computed > PolicyCosts.SHARED_FRACTION * len(prompts) * (width + longest) or any(
        p.image_inputs for p in prompts
    ):
        return False
    # A recurrent layer overwrites its state, which a backward pass needs.
    cache_layers = DynamicCache(config=net.lm.config).layers
    sharded = any(hasattr(module, "unshard") for module in net.modules())
    return not sharded and not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache_layers)


def compute_hidden_states(
    net: LanguageModel, prompts: Sequence[Prompt], replies: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the hidden states [B, L, D] that predict each token of the left-aligned replies, and the tokens [B, L]."""
    prompt_index: dict[int, int] = {}
    rows = to_device([prompt_index.setdefault(id(p), len(prompt_index)) for p in prompts], device)
    ids, mask = pad_left(list({id(p): p for p in prompts}.values()), pad, device)
    positions, cache = net.positions(ids, mask, {}), DynamicCache(config=net.lm.config)
    hidden = net.hidden(ids, mask, positions, cache)[rows, -1:]
    longest = max(1, *map(len, replies))
    reply_tokens = to_device([[*reply, *[pad] * (longest - len(reply))] for reply in replies], device)
    is_token = torch.arange(longest, device=device) < to_device([*map(len, replies)], device)[:, None]
    if longest > 1:
        cache.reorder_cache(rows)  # type: ignore[arg-type]
        full_mask = torch.cat([mask[rows], is_token[:, :-1].to(mask.dtype)], 1)
        reply_positions = positions[rows, -1:] + torch.arange(1, longest, device=device)
        hidden = torch.cat([hidden, net.hidden(reply_tokens[:, :-1], full_mask, reply_positions, cache)], 1)
    return hidden, reply_tokens
