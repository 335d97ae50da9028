"""Line charts as inline SVG; colors are CSS classes c0, c1, ... of the page.

The module also computes the curves of metrics, and the table of settings that differ between runs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from embodyrl.config.compose import flatten
from embodyrl.monitor.intervals import wilson
from embodyrl.reports.history import History

_WIDTH, _HEIGHT = 440, 226
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34
_MIN_SMOOTHED_POINTS, _DECAY = 24, 0.8
"""Minimum number of points of a smoothed curve, and the decay of the moving average."""
_LABEL_HEIGHT = 14
"""Height of the label at the last point of a curve, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: points (x, y), and an uncertainty band (x, low, high)."""

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    color: int = 0


@dataclass(frozen=True, slots=True)
class _Frame:
    """Coordinate transform of a chart from data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def to_pixels(self, x: float, y: float) -> tuple[float, float]:
        spread_x, spread_y = self.x[1] - self.x[0] or 1.0, self.y[1] - self.y[0] or 1.0
        return (
            round(_LEFT + (x - self.x[0]) / spread_x * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_HEIGHT - _BOTTOM - (y - self.y[0]) / spread_y * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    def to_path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join("{:g},{:g}".format(*self.to_pixels(x, y)) for x, y in points)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round axis ticks that cover low..high.

    >>> ticks(0, 1)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    low, high = min(low, high), max(low, high)
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    raw = max((high - low) / count, 1e-300)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * m for m in (1, 2, 2.5, 5, 10) if scale * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def format_number(value: float) -> str:
    """Format a number in a short form: 0.25, 1200, 1.2e-05."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the exponential moving average of a curve with bias correction (Kingma and Ba 2015).

    >>> smooth([(0, 1.0), (1, 2.0)])[0]
    (0, 1.0)
    """
    mean, weight, result = 0.0, 0.0, []
    for x, y in points:
        mean, weight = _DECAY * mean + (1 - _DECAY) * y, _DECAY * weight + 1 - _DECAY
        result.append((x, mean / weight))
    return result


def fits_log_axis(lines: Sequence[Line]) -> bool:
    """Return True if a logarithmic axis fits: all values are positive and span two orders of magnitude."""
    ys = [y for line in lines for _, y in line.points]
    return bool(ys) and min(ys) > 0 and max(ys) / min(ys) > 100


def plot_lines(lines: Sequence[Line], *, limits: tuple[float, float] | None = None, log: bool = False) -> str:
    """Plot curves over training steps; `limits` is the range of y, and `log` selects a logarithmic y axis."""
    if log:
        lines = [replace(line, points=[(x, math.log10(y)) for x, y in line.points], band=()) for line in lines]
    xs = [x for line in lines for x, _ in line.points]
    ys = [v for line in lines for v in (*(y for _, y in line.points), *(v for _, *span in line.band for v in span))]
    marks = ticks(*(limits or (min(ys), max(ys))))
    frame = _Frame((min(xs), max(xs)), (marks[0], marks[-1]))
    parts = [_plot_axes(frame, marks, log=log)]
    parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}" text-anchor="end">training step</text>')
    for line in lines:
        if len(line.band) > 1:
            outline = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
            parts.append(f'<polygon class="band c{line.color}" points="{frame.to_path(outline)}"/>')
        elif line.band:
            ((x, low, high),) = line.band
            parts.append(f'<polyline class="line c{line.color}" points="{frame.to_path([(x, low), (x, high)])}"/>')
        parts += _plot_curve(frame, line)
        spans = {x: f" [{format_number(low)}, {format_number(high)}]" for x, low, high in line.band}
        for x, y in line.points:
            cx, cy = frame.to_pixels(x, y)
            value = 10**y if log else y
            text = escape(f"{line.label} · step {format_number(x)}: {format_number(value)}{spans.get(x, '')}")
            dot_class = "dot" if len(line.points) <= 12 else "dot quiet"
            parts.append(
                f'<circle class="{dot_class} c{line.color}" cx="{cx}" cy="{cy}" r="3"><title>{text}</title></circle>'
            )
    return _wrap_svg([*parts, *_plot_labels(frame, lines, log=log)])


def _plotted_points(line: Line) -> Sequence[tuple[float, float]]:
    """Return the points of the curve, smoothed if it is long."""
    return smooth(line.points) if len(line.points) > _MIN_SMOOTHED_POINTS else line.points


def _plot_curve(frame: _Frame, line: Line) -> Iterator[str]:
    """Yield a curve, and below a smoothed curve its measured values."""
    plotted = _plotted_points(line)
    if plotted is not line.points:
        yield f'<polyline class="line raw c{line.color}" points="{frame.to_path(line.points)}"/>'
    yield f'<polyline class="line c{line.color}" points="{frame.to_path(plotted)}"/>'


def _plot_labels(frame: _Frame, lines: Sequence[Line], *, log: bool) -> Iterator[str]:
    """Yield the last value of each line, at heights at which the labels do not overlap."""
    heights: list[float] = []
    for line in lines:
        x, y = frame.to_pixels(*_plotted_points(line)[-1])
        last = line.points[-1][1]
        height = max(y - 7, 10)
        while any(abs(height - other) < _LABEL_HEIGHT for other in heights):
            height += 1
        heights.append(height)
        text = format_number(10**last if log else last)
        yield f'<text class="value c{line.color}" x="{x}" y="{height}" text-anchor="end">{text}</text>'


def _plot_axes(frame: _Frame, marks: Sequence[float], *, log: bool = False) -> str:
    parts = []
    for mark in marks:
        x, y = frame.to_pixels(frame.x[0], mark)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        label = format_number(10**mark if log else mark)
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>')
    for step in (m for m in ticks(*frame.x, 5) if frame.x[0] <= m <= frame.x[1] and m == int(m)):
        x, _ = frame.to_pixels(step, marks[0])
        parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 16}" text-anchor="middle">{format_number(step)}</text>')
    return "".join(parts)


def _wrap_svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


_MAX_POINTS = 120
_SIZES = ("effective_episodes", "episodes")
"""Names of metrics that count the episodes of a success rate, in order of preference."""


def build_curve(history: History, metric: str, label: str, color: int) -> Line:
    """Return the curve of one metric of a run, with a 95 % band for success rates, and a min-max band otherwise."""
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


def find_differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return each key whose value differs between configs, with the value of every config."""
    leaves = [flatten(config) for config in configs]
    rows = [(name, [part.get(name) for part in leaves]) for name in sorted({n for part in leaves for n in part})]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
