"""`loss_agg_func` as linear weights over a whole optimizer step: micro-batch losses add up exactly.

A unit is what carries one probability ratio: a token, an action or a chunk (`logprob_type`). A sequence is an episode,
or the part of it that falls into the optimizer step. Only executed actions count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodyrl.algorithms.settings import AggregationMode, TokenLevel
from embodyrl.types import BoolArray, FloatArray, IntArray

SUM_MODES = frozenset({"token-sum", "seq-mean-token-sum"})
"""Modes that add the tokens of an action; the others average them."""
WEIGHT_SUM = "weight_sum"
MEANS = frozenset({"kl", "ref_kl", "entropy", "ratio", "clip_fraction", "logprob_gap"})
"""Weighted sums that are divided by the summed weights, so that they stay means under every `loss_agg_func`."""


def action_weights(
    mode: AggregationMode, episode: IntArray, valid: BoolArray, *, level: TokenLevel, longest_episode: int
) -> FloatArray:
    """Weight of each action in the loss of one optimizer step.

    With u units, S sequences and u_i units of sequence i, a unit weighs: token-mean 1/u; token-sum 1;
    seq-mean-token-sum 1/S; seq-mean-token-mean 1/(S u_i); seq-mean-token-sum-norm 1/(S X), X the units of an
    episode that its time limit ends (arXiv 2503.20783), a constant of the run. At chunk level the weight of a chunk is
    spread evenly over its executed actions.

    Args:
        mode: `loss_agg_func`.
        episode: [B] episode of each sample.
        valid: [B, K] executed actions; at least one per sample.
        level: what a unit is.
        longest_episode: chunks of an episode that its time limit ends, for seq-mean-token-sum-norm.

    Returns:
        [B, K] float32, 0 where not valid.
    """
    assert valid.any(axis=1).all(), "a sample without an executed action"
    unit = valid.astype(np.float64)
    if level == TokenLevel.chunk_level:
        unit /= unit.sum(axis=1, keepdims=True)
    per_chunk = 1 if level == TokenLevel.chunk_level else valid.shape[1]
    _, index = np.unique(episode, return_inverse=True)
    per_sequence = np.bincount(index, weights=unit.sum(axis=1))
    sequences = len(per_sequence)
    if mode == "token-mean":
        unit /= unit.sum()
    elif mode == "seq-mean-token-sum":
        unit /= sequences
    elif mode == "seq-mean-token-mean":
        unit /= sequences * per_sequence[index][:, None]
    elif mode == "seq-mean-token-sum-norm":
        unit /= sequences * longest_episode * per_chunk
    else:
        assert mode == "token-sum", mode
    return unit.astype(np.float32)


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the shares of all micro-batches (and ranks) of one optimizer step.

    Names ending in `_max` take the maximum, everything else adds up; the names in `MEANS` are then divided by the
    summed `weight_sum`, which is dropped.

    >>> merge_metrics([{"loss": 1.0, "ratio_max": 2.0}, {"loss": 0.5, "ratio_max": 1.0}])
    {'loss': 1.5, 'ratio_max': 2.0}
    """
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith("_max"):
                merged[name] = max(merged.get(name, value), value)
            else:
                merged[name] = merged.get(name, 0.0) + value
    total = merged.pop(WEIGHT_SUM, 0.0)
    return {name: value / total if name in MEANS and total else value for name, value in merged.items()}
