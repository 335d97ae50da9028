"""Comparison of new result cards with stored cards, to detect drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from embodyrl.monitor.intervals import student_t
from embodyrl_results.table import AFTER, BEFORE, Card, score_row


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of new and stored scores of a recipe, before or after training."""

    name: str
    end: str
    stored: float
    new: float
    low: float
    """Lower bound of the 95 % prediction interval for the mean of the new seeds."""
    high: float
    success: bool
    """True if the scores are success rates, False if they are returns."""

    @property
    def drifted(self) -> bool:
        """True if the new mean is outside the prediction interval."""
        return not self.low <= self.new <= self.high

    def __str__(self) -> str:
        if self.success:
            stored, new, low, high = (f"{100 * v:.1f}" for v in (self.stored, self.new, self.low, self.high))
        else:
            stored, new, low, high = (f"{v:.4g}" for v in (self.stored, self.new, self.low, self.high))
        outcome = "DRIFT" if self.drifted else "ok"
        return f"{self.name}: {self.end} {stored} stored, {new} new, interval [{low}, {high}]: {outcome}"


def compare(name: str, stored: Sequence[Card], new: Sequence[Card]) -> list[Comparison]:
    """Compare the scores of new and stored cards after training, and before training if all cards have that score."""
    ends = [("after", AFTER)]
    if all(len(card["figures"]) > 1 for card in (*stored, *new)):
        ends.insert(0, ("before", BEFORE))
    comparisons = []
    for label, end in ends:
        old, now = ([score_row(card, end) for card in cards] for cards in (stored, new))
        low, high = prediction_interval(old, len(now))
        stored_mean, new_mean = (fmean(row["value"] for row in rows) for rows in (old, now))
        success = old[0]["kind"] == "success"
        comparisons.append(Comparison(name, label, stored_mean, new_mean, low, high, success))
    return comparisons


def prediction_interval(rows: Sequence[dict[str, Any]], count: int) -> tuple[float, float]:
    """Return the 95 % prediction interval for the mean of `count` new seeds.

    mean ± t s sqrt(1/n + 1/m) (Hahn and Meeker 1991, section 4.7) for n stored and m new seeds. s is the standard
    deviation over the stored seeds. For one seed or equal scores, s is the standard error of one evaluation and t 1.96.
    """
    values, n = [row["value"] for row in rows], len(rows)
    deviation = stdev(values) if n > 1 else 0.0
    # Equal scores are one evaluation of a common checkpoint.
    scale = student_t(n - 1) * deviation if deviation else 1.96 * math.sqrt(fmean(map(_variance, rows)))
    half_width = scale * math.sqrt(1 / n + 1 / count)
    return fmean(values) - half_width, fmean(values) + half_width


def _variance(row: dict[str, Any]) -> float:
    """Return the variance of the score of one evaluation.

    For success rates, two successes and two failures are added (Agresti and Coull).
    """
    n = row["episodes"]
    if row["kind"] == "success":
        p = (row["value"] * n + 2) / (n + 4)
        return p * (1 - p) / (n + 4)
    if row["high"] is None:
        return math.inf  # a single state has no interval
    return ((row["high"] - row["value"]) / 1.96) ** 2


def differences(stored: Sequence[Card], new: Sequence[Card]) -> list[str]:
    """Return the conditions that differ between stored and new cards: possible causes of drift."""
    conditions = {
        "command": lambda card: _remove_seed(card["command"]),
        "config": lambda card: card["config_sha256"][:16],
        "own code": lambda card: ", ".join(map(" ".join, card.get("sources", {}).items())) or "none",
        "weights": lambda card: card["model"]["weights"],
        "commit": lambda card: (card["commit"] or "not known")[:8],
        "processor": lambda card: card["machine"].get("processor"),
        "torch": lambda card: card["machine"].get("torch"),
    }
    lines = []
    for name, value in conditions.items():
        old, now = ({str(value(card)) for card in cards} for cards in (stored, new))
        if old != now:
            lines.append(f"  {name}: {', '.join(sorted(old))} stored, {', '.join(sorted(now))} new")
    old_cpu, new_cpu = (_mean_cpu(cards) for cards in (stored, new))
    if old_cpu and new_cpu and not 0.67 < new_cpu / old_cpu < 1.5:
        lines.append(f"  CPU-seconds: {old_cpu:.0f} stored, {new_cpu:.0f} new")
    return lines


def _remove_seed(command: str) -> str:
    """Return a command without the seed and the output folder."""
    excluded = ("seed=", "runner.output_dir=", "runner.experiment_name=", "runner.on_existing=")
    return " ".join(argument for argument in command.split(" ") if not argument.startswith(excluded))


def _mean_cpu(cards: Sequence[Card]) -> float:
    hours = [card["costs"].get("cpu_hours") for card in cards]
    return 3600 * fmean(hour for hour in hours if hour) if any(hours) else 0.0
