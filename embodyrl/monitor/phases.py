"""Phases of a training step, their durations (the `time/*` metrics) as a tree, and formatting of durations."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

PHASES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("simulate", "render", "reset", "infer"),
    "score": (),
    "update": (),
    "publish": (),
    "checkpoint": (),
    "validate": (),
}
"""Sequential phases of a training step, each with its sub-phases, which may overlap in time."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Phase of a training step, with its depth in the tree of phases."""

    name: str
    depth: int
    seconds: float
    share: float
    """Fraction of the duration of the whole step."""


def step_seconds(metrics: Mapping[str, float | None]) -> float:
    """Return the duration of a training step including its validation, in seconds; 0 for any other row."""
    whole = metrics.get("time/step") or 0.0
    return whole + (metrics.get("time/validate") or 0.0) if whole else 0.0


def run_seconds(rows: Sequence[Mapping[str, float | None]]) -> float:
    """Return the duration of a run in seconds, including steps without a row of metrics."""
    seconds, previous_step = 0.0, 0.0
    for row in rows:
        step = row.get("step") or 0.0
        if step_time := row.get("time/step"):
            seconds += step_time * max(1.0, step - previous_step) + (row.get("time/validate") or 0.0)
        previous_step = step
    return seconds


def build_time_tree(metrics: Mapping[str, float | None]) -> list[Phase]:
    """Return the phases of a step in order; time outside all phases has the name `other`."""
    total = step_seconds(metrics)
    if not total:
        return []
    phases: list[Phase] = []
    for name, parts in PHASES.items():
        for depth, phase in ((0, name), *((1, part) for part in parts)):
            seconds = metrics.get(f"time/{phase}")
            if seconds is not None:
                phases.append(Phase(phase, depth, seconds, seconds / total))
    rest = max(0.0, total - sum(phase.seconds for phase in phases if phase.depth == 0))
    return [*phases, Phase("other", 0, rest, rest / total)]


def sum_times(rows: Collection[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the total seconds of each `time/*` metric over several rows of metrics."""
    names = [name for name in set().union(*rows) if name.startswith("time/")]
    return {name: sum(row.get(name) or 0.0 for row in rows) for name in names}


def format_duration(seconds: float) -> str:
    """Format a duration: 8 s, 3 min 20 s, 5 h 12 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_rough_duration(seconds: float) -> str:
    """Format an estimated duration with one unit, or hours and minutes: 40 s, 7 min, 5 h 12 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return format_duration(60 * round(seconds / 60)).replace(" 00 s", "")
