"""The command `latency`: success of evaluations against the delay of their chunks."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_run
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.extensions.latency.plot import plot
from embodyrl.extensions.reporting.history import read_history
from embodyrl.files import write_atomically
from embodyrl.monitor.history import EpisodeRow, score_of
from embodyrl.monitor.intervals import Score

NAIVE, ENSEMBLE = "naive", "ensembling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Evaluations of one method at one delay."""

    method: str
    delay: tuple[int, int]
    """Smallest and largest delay, env steps."""
    score: Score
    runs: int

    @property
    def label(self) -> str:
        """The delay as a number, or as a range."""
        low, high = self.delay
        return str(high) if low == high else f"{low}-{high}"


def latency(args: argparse.Namespace) -> int:
    """Run `embodyrl latency`."""
    if not args.words:
        raise ConfigError("embodyrl latency takes evaluations: embodyrl latency runs/delay_0 runs/delay_4.")
    points = collect_points([find_run(word) for word in args.words])
    lines = table(points)
    if args.plot:
        try:
            write_atomically(Path(args.plot), plot(points).encode())
        except OSError as error:
            raise EmbodyError(f"Cannot write {args.plot}: {error.strerror}. Choose another --plot FILE.") from error
        lines.append(f"plot  {args.plot}")
    show_result(args, [_as_json(point) for point in points], lines)
    return 0


def collect_points(runs: Sequence[Path]) -> list[Point]:
    """Return the last evaluation of each run, pooled by method and delay.

    Raises:
        ConfigError: a run has no complete evaluation.
    """
    episodes: dict[tuple[str, tuple[int, int]], list[EpisodeRow]] = defaultdict(list)
    counts: dict[tuple[str, tuple[int, int]], int] = defaultdict(int)
    for run in runs:
        history = read_history(run)
        if not history.evaluations:
            raise ConfigError(f"{run} has no complete evaluation. Pass runs of `embodyrl eval`.")
        key = method_of(history.config), _delay_of(history.config)
        episodes[key] += history.evaluations[-1].own
        counts[key] += 1
    return [
        Point(method=method, delay=delay, score=score_of(found), runs=counts[method, delay])
        for (method, delay), found in sorted(episodes.items())
    ]


def method_of(config: Mapping[str, Any]) -> str:
    """Return the method by which the policy of a run handles delays: model.rtc, temporal ensembling or naive."""
    if config.get("env", {}).get("ensemble_chunk"):
        return ENSEMBLE
    rtc = config.get("model", {}).get("rtc", "off")
    return NAIVE if rtc == "off" else str(rtc)


def _delay_of(config: Mapping[str, Any]) -> tuple[int, int]:
    steps = config.get("env", {}).get("control", {}).get("latency_steps", 0)
    return (steps, steps) if isinstance(steps, int) else (steps[0], steps[1])


def table(points: Sequence[Point]) -> list[str]:
    """Return one line per delay and one column per method."""
    methods = list(dict.fromkeys(point.method for point in points))
    delays = sorted({point.delay for point in points})
    cells = {(point.delay, point.method): point for point in points}
    rows = [["delay", *methods]]
    for delay in delays:
        found = [cells.get((delay, method)) for method in methods]
        label = next(point.label for point in found if point is not None)
        rows.append([label, *("-" if point is None else str(point.score) for point in found)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _as_json(point: Point) -> dict[str, Any]:
    low, high = point.score.interval
    return {
        "method": point.method,
        "delay": list(point.delay),
        "value": point.score.value,
        "low": low,
        "high": high,
        "episodes": point.score.episodes,
        "runs": point.runs,
    }
