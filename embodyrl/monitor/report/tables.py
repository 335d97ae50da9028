"""The numbers of a report: success per task, paired comparison, curves with bands, settings that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from embodyrl.config.settings import flat, plain, spell
from embodyrl.monitor.history import Evaluation, History
from embodyrl.monitor.intervals import Mean, mcnemar, wilson
from embodyrl.monitor.report.charts import Line

_MAX_POINTS = 120
_SIZES = ("effective_episodes", "episodes")
"""How many episodes are behind a rate; older runs only know how many were played."""


def compare(first: Evaluation, second: Evaluation, names: tuple[str, str]) -> str:
    """Compare episodes where task, initial state and seed agree, in a line."""
    before = {(e.task, e.reset_id, e.seed): e for e in first.episodes}
    pairs = [(before[k], e) for e in second.episodes if (k := (e.task, e.reset_id, e.seed)) in before]
    if not pairs:
        return "no episodes with the same task, initial state and seed: no paired test"
    line = f"paired on {len(pairs)} episodes with the same initial state and seed"
    if all(e.success_once is None for pair in pairs for e in pair):
        gain = Mean.of((a.reset_id, b.episode_return - a.episode_return) for a, b in pairs)
        low, high = gain.interval
        verdict = _verdict(not low <= 0.0 <= high)
        return f"{line}: return of {names[1]} less that of {names[0]} {gain} ({verdict})"
    by_state: Counter[int] = Counter()
    wins = [0, 0]
    for a, b in pairs:
        if bool(a.success_once) != bool(b.success_once):
            wins[bool(b.success_once)] += 1
            by_state[a.reset_id] += 1 if b.success_once else -1
    p_value, states = mcnemar(list(by_state.values())), len({a.reset_id for a, _ in pairs})
    test = "McNemar" if states == len(pairs) else f"McNemar over {states} states"
    return (
        f"{line}: only {names[0]} succeeds {wins[0]}, only {names[1]} {wins[1]}; {test} p = {p_value:.3g} "
        f"({_verdict(p_value < 0.05)})"
    )


def _verdict(differ: bool) -> str:
    return "differ" if differ else "no significant difference"


def curve(history: History, metric: str, label: str, color: int) -> Line:
    """One metric of one run: success rates pool their episodes and carry a 95 % band, others a mean and their range."""
    rows = [row for row in history.rows if row.get(metric) is not None]
    per_point = max(1, -(-len(rows) // _MAX_POINTS))
    kind = metric.split("/")[0]
    counts = next((name for size in _SIZES if history.series(name := f"{kind}/{size}")), "")
    points, band = [], []
    for start in range(0, len(rows), per_point):
        part = rows[start : start + per_point]
        step = float(part[-1]["step"] or 0)
        values = [float(row[metric] or 0) for row in part]
        if metric.endswith("/success_once") and metric.count("/") == 1 and all(row.get(counts) for row in part):
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
