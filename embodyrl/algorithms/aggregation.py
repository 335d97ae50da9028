"""What each unit counts: `loss_agg_func` as linear weights over a whole optimizer step, and corrections for older data.

A unit is what carries one probability ratio: a token, an action or a chunk (`logprob_type`). A sequence is an episode,
or the part of it that falls into the optimizer step. Only executed actions count. The weights are linear, so that the
losses of micro-batches add up exactly.

Corrections are pure functions without gradient on units [B, ...]: log w = log pi_proximal - log pi_behaviour, the
policy at the start of the update against the one that acted. What they remove stays in the denominator of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from embodyrl.algorithms.policy_losses import bounded_ratio, kl
from embodyrl.algorithms.protocol import Credit, Measured
from embodyrl.algorithms.settings import AggregationMode, TokenLevel, WeightLevel, WeightMode
from embodyrl.types import BoolArray, Episode, FloatArray, IntArray

if TYPE_CHECKING:
    import torch


SUM_MODES = frozenset({"token-sum", "seq-mean-token-sum"})
"""Modes that add the tokens of an action; the others average them."""
WEIGHT_SUM = "weight_sum"
MEANS = frozenset({"kl", "ref_kl", "entropy", "ratio", "clip_fraction", "logprob_gap"})
"""Weighted sums that are divided by the summed weights, so that they stay means under every `loss_agg_func`."""


def to_units(
    token_values: torch.Tensor, valid: torch.Tensor, level: TokenLevel, *, whole: bool = False
) -> torch.Tensor:
    """Sum tokens [B, L] to the given level: [B, K, D] tokens, [B, K, 1] actions, [B, 1, 1] chunks; 0 if not valid.

    `whole`: all are valid.
    """
    batch, actions = valid.shape
    assert token_values.shape[1] % actions == 0, (token_values.shape, valid.shape)
    grid = token_values.reshape(batch, actions, -1)
    if not whole:
        # `where` and not a product: what the policy says about actions that never ran may be anything, NaN included.
        grid = grid.where(valid[:, :, None], grid.new_zeros(()))
    # Small networks feel every operation: a sum over one token is spared.
    if level == TokenLevel.token_level or (level == TokenLevel.action_level and grid.shape[2] == 1):
        return grid
    return grid.sum(2)[:, :, None] if level == TokenLevel.action_level else grid.sum((1, 2))[:, None, None]


def unit_mask(valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Valid units [B, K, 1] or [B, 1, 1]."""
    return valid.any(1)[:, None, None] if level == TokenLevel.chunk_level else valid[:, :, None]


def unit_advantage(advantage: torch.Tensor, valid: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Advantage [B, K] as [B, K, 1], or [B, 1, 1] at chunk level, where the executed actions share one value."""
    if level != TokenLevel.chunk_level:
        return advantage[:, :, None]
    return ((advantage * valid).sum(1) / valid.sum(1))[:, None, None]


def mean_share(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted sum over actions (or chunks) of the mean over the tokens of each."""
    return _shares(units, weight).sum()


def _shares(units: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, K] or [B, 1]"""
    per_row = weight if units.shape[1] == weight.shape[1] else weight.sum(1, keepdim=True)
    return (units[..., 0] if units.shape[2] == 1 else units.mean(2)) * per_row


def equal_shares(mask: BoolArray) -> FloatArray:
    """Equal weights that sum to 1 where the mask holds, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


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
    # In double precision: a batch may hold millions of units, and the weights have to sum to 1.
    unit = valid.astype(np.float64)
    if level == TokenLevel.chunk_level:
        unit /= unit.sum(axis=1, keepdims=True)
    if mode == "token-mean":
        return (unit / unit.sum()).astype(np.float32)
    per_chunk = 1 if level == TokenLevel.chunk_level else valid.shape[1]
    _, index = np.unique(episode, return_inverse=True)
    per_sequence = np.bincount(index, weights=unit.sum(axis=1))
    sequences = len(per_sequence)
    if mode == "seq-mean-token-sum":
        unit /= sequences
    elif mode == "seq-mean-token-mean":
        unit /= sequences * per_sequence[index][:, None]
    elif mode == "seq-mean-token-sum-norm":
        unit /= sequences * longest_episode * per_chunk
    else:
        assert mode == "token-sum", mode
    return unit.astype(np.float32)


def batch_metrics(episodes: Sequence[Episode], pairs: Sequence[tuple[Episode, Credit]]) -> dict[str, float]:
    """Of a batch before its update: groups that teach nothing, and the advantages; `pairs`: what is trained on."""
    groups = {episode.spec.group_id for episode in episodes}
    kept = [episode.spec.group_id for episode, _ in pairs]
    metrics = {"train/groups_without_signal": 1.0, "train/groups_filtered": 1.0 - len({*kept}) / len(groups)}
    if pairs:
        # All at once: of a thousand short episodes the loops would take as long as a mini-batch.
        valid = np.concatenate([episode.valid for episode, _ in pairs])
        whole = np.concatenate([credit.advantage for _, credit in pairs])
        loud = np.repeat(kept, [len(e.valid) for e, _ in pairs])[((whole != 0) & valid).any(axis=1)]
        metrics["train/groups_without_signal"] = 1.0 - len(np.unique(loud)) / len(groups)
        advantage = whole[valid].astype(np.float64)
        metrics["train/advantage_mean"] = float(advantage.mean())
        metrics["train/advantage_std"] = float(advantage.std())
        metrics["train/advantage_abs_max"] = float(np.abs(advantage).max())
    return metrics


def value_metrics(pairs: Sequence[tuple[Episode, Credit]]) -> dict[str, float]:
    """Return the means of values and targets, and the share of the targets' variance that the values explain."""
    ran, value, returns = (
        np.concatenate(part) for part in zip(*((e.valid, e.value, c.returns) for e, c in pairs), strict=True)
    )
    ran = ran if ran.shape == returns.shape else ran.any(axis=1, keepdims=True)
    value, returns = value[ran].astype(np.float64), returns[ran].astype(np.float64)
    spread = returns.var()
    return {
        "train/value_mean": float(value.mean()),
        "train/value_target_mean": float(returns.mean()),
        "train/explained_variance": float(1.0 - (returns - value).var() / spread) if spread > 0 else 0.0,
    }


def metrics_of(parts: Sequence[Measured], scored: int = 0) -> list[dict[str, float]]:
    """Return the metrics of each micro-batch, computed for all together; `merge_metrics` joins those of a step.

    `kl` is the low-variance estimate of KL(old || policy), `logprob_gap` the mean |new - old| of a token. `scored` is
    `PolicySpec.scored`: tokens that have no log-probability of their own count in no mean.
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
    shares = {name: _shares(units[..., : scored or None], rows["weight"]) for name, units in means.items()}
    shares[WEIGHT_SUM] = rows["weight"]
    table = torch.stack([*(share.sum(1) for share in shares.values()), rows["ratio"].flatten(1).amax(1)])
    added = torch.stack([number for part in parts for number in part.sums.values()])
    # One copy from the device: each waits until all that was started there is done.
    numbers = torch.cat([table.flatten(), added]).double().cpu().numpy()
    table, sums = np.split(numbers, [table.numel()])
    table, sums = table.reshape(len(shares) + 1, -1), sums.reshape(len(parts), -1).tolist()
    starts = np.cumsum([0, *(len(part.rows["weight"]) for part in parts[:-1])])
    totals = np.add.reduceat(table[:-1], starts, axis=1).T.tolist()
    highest = np.maximum.reduceat(table[-1], starts).tolist()
    return [
        dict(zip(parts[0].sums, own, strict=True)) | dict(zip(shares, total, strict=True)) | {"ratio_max": most}
        for own, total, most in zip(sums, totals, highest, strict=True)
    ]


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


def importance_weights(
    log_weight: torch.Tensor, valid: torch.Tensor, *, cap: float, mode: WeightMode, level: WeightLevel
) -> torch.Tensor:
    """Return w where w <= cap; above it 0 (mask; decoupled PPO, arXiv 2505.24298) or the cap (truncate; TIS).

    Args:
        log_weight: [B, ...] log w of each unit.
        valid: bool, same shape.
        cap: upper bound of w.
        mode: what happens above it.
        level: one w per unit, or one per sample: the product over its units (sequence) or their geometric mean.
    """
    kept = log_weight.where(valid, log_weight.new_zeros(()))
    if level != WeightLevel.token:
        total = kept.flatten(1).sum(1)
        count = valid.flatten(1).sum(1) if level == WeightLevel.geometric else 1
        kept = (total / count).reshape(-1, *[1] * (kept.dim() - 1)).expand_as(kept)
    weight = bounded_ratio(kept)
    if mode == WeightMode.truncate:
        return weight.clamp(max=cap)
    return weight.where(weight <= cap, weight.new_zeros(()))


def second_moment_mask(log_weight: torch.Tensor, valid: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """Drop the units with the largest (log w)^2 until the mean of the rest is below the threshold (arXiv 2510.01161).

    At least one unit stays.

    Returns:
        bool, same shape.
    """
    moment, order = log_weight.square()[valid].sort(descending=True, stable=True)
    count = len(moment)
    # rest[i]: mean of moment[i] and all smaller ones. It falls with i, so the units to drop come first.
    rest = moment.flip(0).cumsum(0).flip(0) / moment.new_ones(count).cumsum(0).flip(0)
    dropped = int((rest >= threshold).sum().clamp(max=count - 1))
    kept = valid.new_ones(count)
    kept[order[:dropped]] = False
    mask = valid.clone()
    mask[valid] = kept
    return mask


def off_policy_mask(log_ratio_mean: torch.Tensor, advantage: torch.Tensor, *, delta: float) -> torch.Tensor:
    """Keep a unit unless A < 0 and its sequence's mean of log pi_behaviour - log pi exceeds delta.

    The paper (arXiv 2512.02556, 3.1) takes the probabilities of the engine that sampled, so that what differs between
    engine and trainer counts as off-policy too; recomputed ones would hide it.

    Args:
        log_ratio_mean: [B, 1, 1] mean of log pi_behaviour - log pi over the sequence.
        advantage: [B, K, 1] or [B, 1, 1].
        delta: bound of the mean.

    Returns:
        bool, shape of `advantage`.
    """
    return ~((advantage < 0) & (log_ratio_mean > delta))
