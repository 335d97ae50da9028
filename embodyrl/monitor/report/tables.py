"""The numbers of a report: success per task, paired comparison, curves with bands, settings that differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from embodyrl.config.settings import flat, plain, spell
from embodyrl.monitor.history import History
from embodyrl.monitor.intervals import wilson
from embodyrl.monitor.report.charts import Line

_MAX_POINTS = 120
_SIZES = ("effective_episodes", "episodes")
"""How many episodes are behind a rate; older runs only know how many were played."""


def curve(history: History, metric: str, label: str, color: int) -> Line:
    """One metric of one run: success rates pool their episodes and carry a 95 % band, others a mean and their range."""
    rows = [row for row in history.rows if row.get(metric) is not None]
    per_point = max(1, -(-len(rows) // _MAX_POINTS))
    kind = metric.rpartition("/")[0]
    counts = next((name for size in _SIZES if history.has(name := f"{kind}/{size}")), "")
    points, band = [], []
    for start in range(0, len(rows), per_point):
        part = rows[start : start + per_point]
        step = float(part[-1]["step"] or 0)
        values = [float(row[metric] or 0) for row in part]
        if metric.endswith("/success_once") and all(row.get(counts) for row in part):
            sizes = [float(row[counts] or 0) for row in part]
            successes = sum(v * n for v, n in zip(values, sizes, strict=True))
            points.append((step, successes / sum(sizes)))
            band.append((step, *wilson(min(successes, sum(sizes)), sum(sizes))))
        else:
            points.append((step, sum(values) / len(values)))
            if per_point > 1:
                band.append((step, min(values), max(values)))
    return Line(label=label, points=points, band=band, color=color)


def changed_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value and default of what a saved config sets otherwise, as they are typed."""
    return [
        (name, spell(value), spell(defaults[name]) if name in defaults else "")
        for name, value in flat(config).items()
        if name not in defaults or value != plain(defaults[name])
    ]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Keys whose value is not the same in all configs, with the values."""
    leaves = [flat(config) for config in configs]
    rows = [(name, [part.get(name) for part in leaves]) for name in sorted({n for part in leaves for n in part})]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
