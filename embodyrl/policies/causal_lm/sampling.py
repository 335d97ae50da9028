"""From logits to the next token: penalties and truncation, then the inverse of the cumulative distribution."""

import json
from collections.abc import Callable

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
