"""Phases of a training step and their durations, the `time/*` metrics."""

from collections.abc import Mapping

PHASES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("simulate", "render", "reset", "infer"),
    "score": (),
    "update": (),
    "publish": (),
    "checkpoint": (),
    "validate": (),
}
"""Sequential phases of a training step, each with its sub-phases, which may overlap in time."""


def step_seconds(metrics: Mapping[str, float | None]) -> float:
    """Return the duration of a training step including its validation, in seconds; 0 for any other row."""
    whole = metrics.get("time/step") or 0.0
    return whole + (metrics.get("time/validate") or 0.0) if whole else 0.0
