"""Write the diagrams of the manual as SVG files.

python scripts/make_diagrams.py
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

OUT = Path(__file__).parents[1] / "docs" / "images"
LINE, FONT = 18, "ui-sans-serif, system-ui, sans-serif"
COLORS = {"plain": "#eef2ff", "data": "#ecfdf5", "outer": "#fafafa"}


@dataclass(frozen=True)
class Box:
    """A rounded box; the first line of text is its title."""

    x: int
    y: int
    w: int
    h: int
    text: tuple[str, ...]
    kind: str = "plain"

    def svg(self) -> str:
        """Draw the box with its lines centered."""
        top = self.y + self.h / 2 - LINE * (len(self.text) - 1) / 2 + 5
        lines = [
            f'<text x="{self.x + self.w / 2}" y="{top + LINE * i}" text-anchor="middle"'
            f"{' font-weight=' + chr(34) + '600' + chr(34) if i == 0 else ''}>{escape(line)}</text>"
            for i, line in enumerate(self.text)
        ]
        rect = f'<rect x="{self.x}" y="{self.y}" width="{self.w}" height="{self.h}" rx="8" fill="{COLORS[self.kind]}" stroke="#4f46e5"/>'
        return rect + "".join(lines)


@dataclass(frozen=True)
class Arrow:
    """A straight arrow with a label at its middle."""

    x1: int
    y1: int
    x2: int
    y2: int
    label: str = ""
    dx: int = 0
    dy: int = -7
    anchor: str = "middle"

    def svg(self) -> str:
        """Draw the line and its label, shifted by (dx, dy)."""
        line = f'<line x1="{self.x1}" y1="{self.y1}" x2="{self.x2}" y2="{self.y2}" stroke="#374151" stroke-width="1.5" marker-end="url(#head)"/>'
        x, y = (self.x1 + self.x2) / 2 + self.dx, (self.y1 + self.y2) / 2 + self.dy
        return (
            line
            + f'<text x="{x}" y="{y}" text-anchor="{self.anchor}" font-size="12" fill="#374151">{escape(self.label)}</text>'
        )


DIAGRAMS = {
    "processes": (
        "Processes of a run",
        780,
        330,
        [
            Box(290, 20, 200, 70, ("driver", "schedules, supervises")),
            Box(20, 220, 210, 80, ("env workers", "simulators: reset, step,", "render")),
            Box(550, 220, 210, 80, ("policy hosts", "act; on actor ranks", "also train (FSDP)")),
            Box(290, 220, 200, 80, ("arena", "shared memory,", "one record per chunk"), "data"),
            Arrow(320, 90, 150, 218, "requests", dx=-16, anchor="end"),
            Arrow(190, 218, 352, 92, "reports", dx=22, dy=14, anchor="start"),
            Arrow(460, 90, 630, 218, "requests", dx=16, anchor="start"),
            Arrow(590, 218, 428, 92, "results", dx=-22, dy=14, anchor="end"),
            Arrow(230, 245, 288, 245, "obs"),
            Arrow(288, 282, 232, 282, "actions"),
            Arrow(490, 245, 548, 245, "obs"),
            Arrow(548, 282, 492, 282, "actions"),
        ],
    ),
    "data_plane": (
        "Two pipelined stages of one env worker",
        780,
        220,
        [
            Box(20, 40, 130, 60, ("stage A",), "outer"),
            Box(20, 130, 130, 60, ("stage B",), "outer"),
            Box(170, 40, 180, 60, ("simulate chunk 1", "env worker")),
            Box(370, 40, 180, 60, ("infer chunk 2", "policy host"), "data"),
            Box(570, 40, 180, 60, ("simulate chunk 2", "env worker")),
            Box(170, 130, 180, 60, ("infer chunk 1", "policy host"), "data"),
            Box(370, 130, 180, 60, ("simulate chunk 1", "env worker")),
            Box(570, 130, 180, 60, ("infer chunk 2", "policy host"), "data"),
            Arrow(170, 212, 750, 212, "time", dy=-4),
        ],
    ),
}


def main() -> None:
    """Write each diagram on a white background, so that it is readable on dark pages too."""
    head = '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="#374151"/></marker></defs>'
    for name, (title, width, height, parts) in DIAGRAMS.items():
        drawn = "\n".join(part.svg() for part in parts)
        (OUT / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="13">\n'
            f"<title>{escape(title)}</title>{head}\n"
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>\n{drawn}\n</svg>\n',
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
