"""Plot of scores against delays, as a standalone SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from embodyrl.extensions.latency.points import Point
from embodyrl.extensions.reporting.charts import number, ticks
from embodyrl.monitor.intervals import Rate

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 300, 56, 120, 16, 44
_COLOURS = ("#2563eb", "#d97706", "#0f9d76", "#b83280", "#6d5bd0")
_FONT = "ui-sans-serif, system-ui, sans-serif"


def plot(points: Sequence[Point]) -> str:
    """Return an SVG plot of the score against the maximum delay: one curve per method, with 95 % intervals."""
    rates = all(isinstance(point.score, Rate) for point in points)
    factor = 100.0 if rates else 1.0
    values = [factor * value for point in points for value in (point.score.value, *point.score.interval)]
    marks = ticks(0, 100) if rates else ticks(min(values), max(values))
    longest = max(1, *(point.delay[1] for point in points)) if points else 1

    def at(delay: float, value: float) -> tuple[float, float]:
        x = _LEFT + delay / longest * (_WIDTH - _LEFT - _RIGHT)
        share = (value - marks[0]) / (marks[-1] - marks[0])
        return round(x, 1), round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>']
    for mark in marks:
        _, y = at(0, mark)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#e4e7ec"/>')
        parts.append(_text(_LEFT - 8, y + 4, number(mark), "end"))
    parts += [
        _text(at(delay, marks[0])[0], _HEIGHT - _BOTTOM + 18, str(delay), "middle")
        for delay in sorted({point.delay[1] for point in points})
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, _HEIGHT - 8, "delay, env steps", "middle"))
    parts.append(_text(8, _TOP - 3, "success, %" if rates else "return", "start"))
    for row, method in enumerate(dict.fromkeys(point.method for point in points)):
        colour = _COLOURS[row % len(_COLOURS)]
        own = sorted((point for point in points if point.method == method), key=lambda point: point.delay)
        path = " ".join("{:g},{:g}".format(*at(point.delay[1], factor * point.score.value)) for point in own)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in own:
            x, y = at(point.delay[1], factor * point.score.value)
            low, high = (at(0, factor * value)[1] for value in point.score.interval)
            parts.append(f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high}" stroke="{colour}" opacity="0.5"/>')
            title = escape(f"{method}, delay {point.label}: {point.score}")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"><title>{title}</title></circle>')
        y = _TOP + 12 + 20 * row
        parts.append(f'<circle cx="{_WIDTH - _RIGHT + 22}" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 34, y, method, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="{_FONT}"'
    return f'{head} font-size="13">{"".join(parts)}</svg>\n'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#475467">{escape(text)}</text>'
