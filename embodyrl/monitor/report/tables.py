"""The numbers of a report: success per task, paired comparison, curves with bands, settings that differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from embodyrl.config.keys import all_keys, flat, plain, spell
from embodyrl.monitor.history import EpisodeRow, Evaluation, History
from embodyrl.monitor.intervals import Rate, wilson
from embodyrl.monitor.report.charts import Line

_MAX_POINTS = 120


def rate_of(episodes: Sequence[EpisodeRow], task: str | None = None) -> Rate:
    """Success of the episodes of one task, or of all."""
    chosen = [e for e in episodes if task is None or e.task == task]
    return Rate(sum(e.success_once for e in chosen), len(chosen))


def paired(first: Evaluation, second: Evaluation) -> tuple[int, int, int]:
    """Compare episodes where task, initial state and seed agree: (pairs, only the first succeeded, only the second)."""
    before = {(e.task, e.reset_id, e.seed): e.success_once for e in first.episodes}
    both = [(before[k], e.success_once) for e in second.episodes if (k := (e.task, e.reset_id, e.seed)) in before]
    return len(both), both.count((True, False)), both.count((False, True))


def curve(history: History, metric: str, label: str, color: int) -> Line:
    """One metric of one run: success rates pool their episodes and carry a 95 % band, others a mean and their range."""
    rows = [row for row in history.rows if row.get(metric) is not None]
    per_point = max(1, -(-len(rows) // _MAX_POINTS))
    counts = f"{metric.split('/')[0]}/episodes"
    points, band = [], []
    for start in range(0, len(rows), per_point):
        part = rows[start : start + per_point]
        step = float(part[-1]["step"] or 0)
        values = [float(row[metric] or 0) for row in part]
        if metric.endswith("/success_once") and metric.count("/") == 1 and all(row.get(counts) for row in part):
            sizes = [float(row[counts] or 0) for row in part]
            successes = sum(v * n for v, n in zip(values, sizes, strict=True))
            points.append((step, successes / sum(sizes)))
            band.append((step, *wilson(round(successes), round(sum(sizes)))))
        else:
            points.append((step, sum(values) / len(values)))
            if per_point > 1:
                band.append((step, min(values), max(values)))
    return Line(label=label, points=points, band=band, color=color)


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value and default of what a saved config sets otherwise, as they are typed."""
    keys = all_keys()
    return [
        (name, spell(value), spell(keys[name].default))
        for name, value in flat(config).items()
        if name in keys and value != plain(keys[name].default)
    ]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Keys whose value is not the same in all configs, with the values."""
    leaves = [flat(config) for config in configs]
    rows = [(name, [part.get(name) for part in leaves]) for name in sorted({n for part in leaves for n in part})]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
