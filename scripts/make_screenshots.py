"""Make the images of the documentation from real runs, with headless Chromium.

    python scripts/make_screenshots.py TRAINING EVALUATION

TRAINING is a run folder with curves (`embodyrl train runner.max_steps=20` makes one), EVALUATION one with recordings
(`embodyrl eval env=tabletop model=scripted model.expert_noise=0.9 eval.episodes=21 video=all`). Writes
docs/images/{dashboard,report,gallery}.png.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console, RenderableType

from embodyrl.cli.report import build_dashboard
from embodyrl.reports.history import read_history
from embodyrl.reports.page import write_report

OUT = Path(__file__).parents[1] / "docs" / "images"
GALLERY = """<style>header, nav, footer, main > * { display: none !important; }
#videos { display: block !important; } #filters { display: flex !important; } #gallery { display: grid !important; }
</style><script>for (const v of document.querySelectorAll("#gallery video")) {
  v.src = url(v.dataset.v); v.preload = "auto"; v.removeAttribute("controls");
  v.addEventListener("loadedmetadata", () => { v.currentTime = v.duration * 0.9; }, { once: true });
}</script></body>"""


def shoot(chromium: str, page: Path, name: str, width: int, height: int) -> None:
    """Save a screenshot of a page as a small PNG with at most 256 colors."""
    target = page.with_suffix(".png")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    flags += [f"--screenshot={target}", "--virtual-time-budget=20000", f"--user-data-dir={page.parent / 'profile'}"]
    subprocess.run([chromium, *flags, page.as_uri()], check=True, capture_output=True, timeout=300)
    with Image.open(target) as image:
        picture = image.convert("RGB")
    # Whatever is below the page's last line is cut off.
    box = ImageChops.difference(picture, Image.new("RGB", picture.size, picture.getpixel((0, height - 1)))).getbbox()
    small = picture.crop((0, 0, width, min(height, box[3] + 8) if box else height)).quantize(256)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.png").write_bytes(buffer.getvalue())
    sys.stdout.write(f"{name}.png {small.size[0]} x {small.size[1]}, {len(buffer.getvalue()) / 1024:.0f} KiB\n")


def terminal(shown: RenderableType, title: str) -> str:
    """Return the output of a terminal as an SVG image."""
    console = Console(width=104, record=True, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    return console.export_svg(title=title, unique_id="t" + title.replace(" ", ""))


def browser() -> str:
    """Return the path of Chromium."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found is not None, "needs chromium or google-chrome"
    return found


def main(training: Path, evaluation: Path) -> None:
    """Make all three images."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        svg = terminal(build_dashboard(read_history(training)), f"embodyrl view runs/{training.name}")
        page.write_text(f"<style>body {{ margin: 8px; }} svg {{ width: 1184px; }}</style>{svg}", encoding="utf-8")
        shoot(browser(), page, "dashboard", 1200, 640)
        write_report([training], page)
        shoot(browser(), page, "report", 1280, 1000)
        write_report([evaluation], page)
        page.write_text(page.read_text(encoding="utf-8").replace("</body>", GALLERY), encoding="utf-8")
        shoot(browser(), page, "gallery", 1280, 820)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
