"""How the metric shares of `Algorithm.loss` become the metrics of one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WEIGHT_SUM = "weight_sum"
MEANS = frozenset({"kl", "ref_kl", "entropy", "ratio", "clip_fraction", "logprob_gap"})
"""Weighted sums that are divided by the summed weights, so that they stay means under every `loss_agg_func`."""


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
