"""Token sampling from logits: penalties and truncation, then the inverse CDF."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.config.shared import SamplingSettings
from embodyrl.policies.tensors import compute_cdf
from embodyrl.types import FloatArray, IntArray


def choose(
    logits: Tensor,
    uniform: Tensor | None,
    temperature: float,
    params: SamplingSettings,
    used_tokens: Tensor,
    reply_tokens: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> Tensor:
    """Sample the next tokens [B].

    Args:
        logits: [B, V] float32, neither scaled nor truncated.
        uniform: [B] random numbers in [0, 1); None: choose the most probable tokens.
        temperature: divides the logits after the penalty.
        params: penalties and truncation.
        used_tokens: [B, V] bool, tokens of the prompt and the reply so far, for the penalty (arXiv 1909.05858).
        reply_tokens: [B, T] tokens of the reply so far, padded with -1, for frequency and presence penalties.
        forbidden: ids of tokens with probability 0.
    """
    if params.repetition_penalty != 1.0:
        penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(used_tokens, penalized, logits)
    if reply_tokens is not None and (params.frequency_penalty or params.presence_penalty):
        counts = torch.zeros_like(logits).scatter_add_(
            1, reply_tokens.clamp(min=0), (reply_tokens >= 0).to(logits.dtype)
        )
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if forbidden is not None:
        logits = logits.index_fill(1, forbidden, -torch.inf)
    if uniform is None:
        return logits.argmax(-1)
    cdf = compute_cdf(truncate(logits / temperature, params).softmax(-1))
    # The last sum is 1 up to rounding; scaling by it keeps every sample inside the vocabulary.
    return (
        torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    )


def truncate(logits: Tensor, params: SamplingSettings) -> Tensor:
    """Remove all but the `top_k` most probable tokens, then those outside the nucleus `top_p` (arXiv 1904.09751)."""
    if 0 < params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1.0:
        ordered, index = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        outside = compute_cdf(probability) - probability >= params.top_p
        logits = logits.masked_fill(outside.scatter(1, index, outside), -torch.inf)
    return logits


def mark_prompt_tokens(ids: Tensor, mask: Tensor, logits: Tensor, params: SamplingSettings) -> Tensor:
    """Return a mask [B, V] of tokens in the prompts; [B, 0] without a penalty."""
    if params.repetition_penalty == 1.0:
        return mask[:, :0].bool()
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, mask.bool())


def find_stop(text: str, start: int, stops: Sequence[str]) -> int | None:
    """Return the position of the first stop string that ends after the first `start` characters, or None."""
    positions = [index for stop in stops if (index := text.find(stop, max(0, start - len(stop) + 1))) >= 0]
    return min(positions, default=None)


LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Maximum difference between two computations of a log-probability (nat), by dtype of the weights."""


def to_vllm_params(params: SamplingSettings, top: int) -> dict[str, Any]:
    """Return sampling parameters under the names of vLLM and compatible servers."""
    names = ("top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    return {name: getattr(params, name) for name in names} | {
        "top_k": max(params.top_k, 0),
        "min_tokens": params.min_new_tokens,
        "stop": params.stop or None,
        "stop_token_ids": params.stop_token_ids or None,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,  # a stop string may be a special token
        "logprobs": top,
    }


def derive_reply_seeds(noise: FloatArray) -> list[int]:
    """Return one seed per reply, derived from the first column of uniform noise [B, K]."""
    return [int(float(first) * 2**31) for first in noise[:, 0]]


def allocate_outputs(count: int, limit: int, top: int) -> tuple[IntArray, FloatArray, FloatArray]:
    """Allocate tokens (filled with -1), log-probabilities (0), both [count, limit], and top tokens (-1).

    Top tokens have the layout of `allocate_top_tokens`.
    """
    return (
        np.full((count, limit), -1, np.int64),
        np.zeros((count, limit), np.float32),
        allocate_top_tokens(count, limit, top),
    )


def allocate_top_tokens(count: int, length: int, top: int) -> FloatArray:
    """Allocate an array [B, K, 1 + top, 2] for ids and log-probabilities of top tokens, filled with -1.

    Entry 0 is the sampled token, then the `top` most probable tokens; [B, K, 0, 2] if `top` is 0. Log-probabilities
    are those before temperature and truncation.
    """
    # float32 represents ids up to 2^24 exactly
    return np.full((count, length, 1 + top if top else 0, 2), -1.0, np.float32)


def format_top_tokens(tokens: IntArray, top_tokens: FloatArray, decode: Callable[[int], str]) -> str:
    """Format the top tokens of one reply (see `allocate_top_tokens`) as JSON for `PolicyOutput.top`.

    Token texts are cut to fit into `channels.layout.TOP_BYTES`.
    """

    def format_token(token: int) -> str:
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in decode(token))
        return text.encode(errors="replace")[:16].decode(errors="ignore")

    rows = [[[format_token(int(i)), round(float(p), 3)] for i, p in row if i >= 0] for row in top_tokens[tokens >= 0]]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
