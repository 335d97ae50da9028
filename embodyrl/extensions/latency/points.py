"""Scores of evaluations, grouped by method and delay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import ConfigError
from embodyrl.extensions.reporting.history import other_worlds, read_history
from embodyrl.monitor.history import EpisodeRow, score_of
from embodyrl.monitor.intervals import Score
from embodyrl.plan.keys import state_keys

NAIVE, ENSEMBLE, COMMITTED = "naive", "ensembling", "committed state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Score of one method at one delay, pooled over evaluations."""

    method: str
    delay: tuple[int, int]
    """Minimum and maximum delay in env steps."""
    score: Score
    runs: int

    @property
    def label(self) -> str:
        """Delay as text: a number, or a range such as 2-4."""
        low, high = self.delay
        return str(high) if low == high else f"{low}-{high}"


def collect_points(runs: Sequence[Path]) -> list[Point]:
    """Return one point per method and delay, pooled over the last evaluations of the runs.

    Raises:
        ConfigError: a run has no complete evaluation, or evaluates another environment than the first run.
    """
    first: Mapping[str, Any] = {}
    episodes: dict[tuple[str, tuple[int, int]], list[EpisodeRow]] = defaultdict(list)
    counts: dict[tuple[str, tuple[int, int]], int] = defaultdict(int)
    for run in runs:
        history = read_history(run)
        if not history.evaluations:
            raise ConfigError(f"{run} contains no complete evaluation. Pass runs of `embodyrl eval`.")
        first = first or _without_history(history.config)
        if differs := other_worlds(first, _without_history(history.config), state_keys()):
            raise ConfigError(
                f"{runs[0]} and {run} evaluate different environments ({differs}). Pass runs of one environment."
            )
        key = method_of(history.config), _delay_of(history.config)
        episodes[key] += history.evaluations[-1].own
        counts[key] += 1
    return [
        Point(method=method, delay=delay, score=score_of(found), runs=counts[method, delay])
        for (method, delay), found in sorted(episodes.items())
    ]


def method_of(config: Mapping[str, Any]) -> str:
    """Return a run's method against inference delay: ensembling, the value of model.rtc, committed state, or naive."""
    env = config.get("env", {})
    if env.get("ensemble_chunk"):
        return ENSEMBLE
    if (rtc := config.get("model", {}).get("rtc", "off")) != "off":
        return str(rtc)
    return COMMITTED if env.get("control", {}).get("observe_committed") else NAIVE


def _without_history(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the environment's base type; an observation history does not change the environment."""
    env = dict(config.get("env", {}))
    return {**config, "env": env | {"env_type": str(env.get("env_type")).removesuffix("_history")}}


def _delay_of(config: Mapping[str, Any]) -> tuple[int, int]:
    steps = config.get("env", {}).get("control", {}).get("latency_steps", 0)
    return (steps, steps) if isinstance(steps, int) else (steps[0], steps[1])
