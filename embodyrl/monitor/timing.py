"""Time of a training step: `time/*` metrics as a tree of phases."""

from collections.abc import Mapping

PHASES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("simulate", "render", "reset", "infer"),
    "score": (),
    "update": (),
    "publish": (),
    "checkpoint": (),
    "validate": (),
}
"""Sequential phases with their parts. Parts run concurrently (env workers and policy) and may overlap."""


def step_seconds(metrics: Mapping[str, float | None]) -> float:
    """Return the seconds of a step including its validation; 0 if the row is not a training step."""
    whole = metrics.get("time/step") or 0.0
    return whole + (metrics.get("time/validate") or 0.0) if whole else 0.0
