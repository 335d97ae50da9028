"""The command `latency`, which tabulates and plots the success rate against the inference delay."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_run
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.extensions.latency.plot import plot
from embodyrl.extensions.latency.points import Point, collect_points
from embodyrl.files import write_atomically


def latency(args: argparse.Namespace) -> int:
    """Run `embodyrl latency`: print, and optionally plot, success rates by inference delay."""
    if not args.words:
        raise ConfigError(
            "embodyrl latency needs runs of `embodyrl eval`, for example: embodyrl latency runs/delay_0 runs/delay_4."
        )
    if args.plot and Path(args.plot).suffix != ".svg":
        raise ConfigError(f"--plot {args.plot}: the plot is an SVG file; use a name that ends in .svg.")
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


def table(points: Sequence[Point]) -> list[str]:
    """Return the scores as lines of text: a table with a row per delay and a column per method."""
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
