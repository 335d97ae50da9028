"""Training metrics of a batch before its update, and of the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodyrl.algorithms.policy_losses import compute_weighted_means, to_units
from embodyrl.algorithms.protocol import MetricInputs
from embodyrl.algorithms.settings import TokenLevel
from embodyrl.algorithms.terms import kl
from embodyrl.types import BoolArray, Episode, FloatArray, IntArray

WEIGHT_SUM = "weight_sum"
AVERAGED_METRICS = frozenset({"kl", "ref_kl", "entropy", "ratio", "clip_fraction", "logprob_gap"})
"""Names of metrics that `merge_metrics` divides by the summed weights to obtain means for any `loss_agg_func`."""


def compute_batch_metrics(
    episodes: Sequence[Episode], selected: Sequence[Episode], valid: BoolArray, advantages: FloatArray
) -> dict[str, float]:
    """Return advantage statistics of a batch, and the fractions of groups that are filtered or have no gradient.

    `selected`: the episodes to train on; `valid`, `advantages`: their concatenated action masks and advantages.
    """
    groups = {episode.spec.group_id for episode in episodes}
    selected_groups = np.array([episode.spec.group_id for episode in selected])
    metrics = {
        "train/groups_without_signal": 1.0,
        "train/groups_filtered": 1.0 - len({*selected_groups.tolist()}) / len(groups),
    }
    if selected:
        group_by_row = np.repeat(selected_groups, [len(episode.valid) for episode in selected])
        with_gradient = np.unique(group_by_row[((advantages != 0) & valid).any(axis=1)])
        metrics["train/groups_without_signal"] = 1.0 - len(with_gradient) / len(groups)
        advantage = advantages[valid].astype(np.float64)
        metrics["train/advantage_mean"] = float(advantage.mean())
        metrics["train/advantage_std"] = float(advantage.std())
        metrics["train/advantage_abs_max"] = float(np.abs(advantage).max())
    return metrics


def compute_value_metrics(executed: np.ndarray, value: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Return the mean value, the mean value target, and the explained variance of the values.

    Args:
        executed: [B, K] executed actions.
        value: [B, V] values.
        returns: [B, V] value targets.
    """
    executed = executed if executed.shape == returns.shape else np.asarray(executed.any(axis=1, keepdims=True))
    value, returns = value[executed].astype(np.float64), returns[executed].astype(np.float64)
    variance = returns.var()
    return {
        "train/value_mean": float(value.mean()),
        "train/value_target_mean": float(returns.mean()),
        "train/explained_variance": float(1.0 - (returns - value).var() / variance) if variance > 0 else 0.0,
    }


def count_batch_tokens(cost: IntArray, valid: BoolArray, seconds: float) -> dict[str, float]:
    """Return the throughput of an update on a text batch, and the mean and maximum length of its prompts.

    Args:
        cost: [B] tokens of each sample; the tokens of its prompt include the chat template.
        valid: [B, K] True for the tokens of the reply.
        seconds: duration of the update.
    """
    prompts = cost - valid.sum(1)
    lengths = {"prompt_len": float(prompts.mean()), "prompt_len_max": float(prompts.max())}
    return lengths | {"tokens_per_s": float(cost.sum()) / seconds}


def compute_metrics(parts: Sequence[MetricInputs]) -> list[dict[str, float]]:
    """Return the metrics of each micro-batch, as inputs of `merge_metrics`.

    `kl` is the low-variance estimate of KL(old || policy). `logprob_gap` is the mean |log pi - log pi_old| per token.
    """
    if not parts:
        return []
    import torch

    rows = {name: torch.cat([part.rows[name] for part in parts]) for name in parts[0].rows}
    gap = to_units((rows["logprob"] - rows["old_logprob"]).abs(), rows["valid"], TokenLevel.token_level)
    means = {
        "kl": kl(rows["old"], rows["new"], "low_var_kl"),
        "clip_fraction": rows["clipped"].to(gap.dtype),
        "logprob_gap": gap,
        **{name: rows[name] for name in ("entropy", "ratio", "ref_kl") if name in rows},
    }
    weighted_means = {name: compute_weighted_means(units, rows["weight"]) for name, units in means.items()}
    weighted_means[WEIGHT_SUM] = rows["weight"]
    table = torch.stack([*(share.sum(1) for share in weighted_means.values()), rows["ratio"].flatten(1).amax(1)])
    summed = torch.stack([scalar for part in parts for scalar in part.sums.values()])
    # Copy from the device only once, because each copy synchronizes.
    numbers = torch.cat([table.flatten(), summed]).cpu().numpy()
    table, sums = np.split(numbers, [table.numel()])
    table, sums = table.reshape(len(weighted_means) + 1, -1), sums.reshape(len(parts), -1).tolist()
    starts = np.cumsum([0, *(len(part.rows["weight"]) for part in parts[:-1])])
    # Row by row, because the doubles of one row fit in the cache.
    totals = np.stack([np.add.reduceat(row.astype(np.float64), starts) for row in table[:-1]]).T.tolist()
    highest = np.maximum.reduceat(table[-1], starts).tolist()
    return [
        dict(zip(parts[0].sums, step_sums, strict=True))
        | dict(zip(weighted_means, total, strict=True))
        | {"ratio_max": ratio_max}
        for step_sums, total, ratio_max in zip(sums, totals, highest, strict=True)
    ]


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of all micro-batches (and ranks) of one optimizer step.

    Metrics whose names end in `_max` are maxima, all other metrics are sums. Metrics in `AVERAGED_METRICS` are then
    divided by the sum of `weight_sum`, which is removed.

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
    return {name: value / total if name in AVERAGED_METRICS and total else value for name, value in merged.items()}
