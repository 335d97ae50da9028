"""From logits to the next token: penalties and truncation, then the inverse of the cumulative distribution."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.config.shared import SamplingSettings
from embodyrl.policies.tensors import cumulative
from embodyrl.types import FloatArray, IntArray


def choose(
    logits: Tensor,
    uniform: Tensor | None,
    temperature: float,
    params: SamplingSettings,
    seen: Tensor,
    said: Tensor | None = None,
    barred: Tensor | None = None,
) -> Tensor:
    """Next tokens [B].

    Args:
        logits: [B, V] float32, neither scaled nor truncated.
        uniform: [B] in [0, 1); None: the most probable token.
        temperature: divides the logits after the penalty.
        params: top_k, top_p and repetition_penalty.
        seen: [B, V] bool, tokens of the prompt and the reply so far, for the penalty (arXiv 1909.05858).
        said: [B, T] tokens of the reply so far, -1 where none is, for the penalties of frequency and presence.
        barred: ids of tokens that are not chosen, whatever their probability.
    """
    if params.repetition_penalty != 1.0:
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if said is not None and (params.frequency_penalty or params.presence_penalty):
        times = torch.zeros_like(logits).scatter_add_(1, said.clamp(min=0), (said >= 0).to(logits.dtype))
        logits = logits - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    if barred is not None:
        logits = logits.index_fill(1, barred, -torch.inf)
    if uniform is None:
        return logits.argmax(-1)
    cdf = cumulative(truncate(logits / temperature, params).softmax(-1))
    # The last sum is 1 but for rounding; scaling by it keeps every draw inside the vocabulary.
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
        outside = cumulative(probability) - probability >= params.top_p
        logits = logits.masked_fill(outside.scatter(1, index, outside), -torch.inf)
    return logits


ROUNDING = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a log-probability that rounding explains, by the precision of the weights."""


def in_words_of_vllm(params: SamplingSettings, top: int) -> dict[str, Any]:
    """How replies are drawn, by the names that vLLM and servers like it have for it."""
    names = ("top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    return {name: getattr(params, name) for name in names} | {
        "top_k": max(params.top_k, 0),
        "min_tokens": params.min_new_tokens,
        "stop": params.stop or None,
        "stop_token_ids": params.stop_token_ids or None,
        "include_stop_str_in_output": True,
        "logprobs": top,
    }


def seeds_of(noise: FloatArray) -> list[int]:
    """A seed for each reply, from the first of its uniform numbers [B, K]."""
    return [int(float(first) * 2**31) for first in noise[:, 0]]


def unwritten(count: int, limit: int, top: int) -> tuple[IntArray, FloatArray, FloatArray]:
    """Tokens (-1 after the end), log-probabilities, both [B, limit], and `no_best`: room for an engine's replies."""
    return np.full((count, limit), -1, np.int64), np.zeros((count, limit), np.float32), no_best(count, limit, top)


def no_best(count: int, length: int, top: int) -> FloatArray:
    """Room [B, K, 1 + top, 2] for `rollout.logprobs`: id and log-probability before temperature, penalties, truncation.

    First the token that was said, then the most probable ones; ids below 0 where there is none, empty without `top`.
    """
    return np.full((count, length, 1 + top if top else 0, 2), -1.0, np.float32)  # float32 holds ids up to 2^24


def tell_best(tokens: IntArray, best: FloatArray, decode: Callable[[int], str]) -> str:
    """One row of `no_best` as `PolicyOutput.top`; texts are cut so that they fit into `channels.layout.TOP_BYTES`."""

    def shown(token: int) -> str:
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in decode(token))
        return text.encode(errors="replace")[:16].decode(errors="ignore")

    told = [[[shown(int(i)), round(float(p), 3)] for i, p in row if i >= 0] for row in best[tokens >= 0]]
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"))
