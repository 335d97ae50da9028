"""All recordings of a run on one image: first, middle and last frame of each, with task and outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v2
from PIL import Image, ImageDraw, ImageFont

from embodyrl.errors import EmbodyError
from embodyrl.monitor.history import History

_imageio: Any = imageio.v2  # its readers are typed too narrowly
_HEIGHT, _TEXT, _GAP, _COLUMNS = 160, 38, 10, 3
_PAPER, _INK, _GOOD, _BAD = (24, 24, 28), (235, 235, 235), (60, 207, 145), (240, 115, 106)


def write_contact_sheet(history: History, out: Path) -> int:
    """Write the image and return how many recordings it shows, newest evaluation first.

    Raises:
        EmbodyError: the run has no recording, or `out` cannot be written.
    """
    tiles = []
    for evaluation in reversed(history.evaluations):
        for episode in evaluation.episodes:
            path = history.find_video(episode.video) if episode.video else None
            if path is not None:
                outcome = ("success", _GOOD) if episode.success_once else ("failure", _BAD)
                caption = f"step {evaluation.step} · {episode.steps} steps · state {episode.reset_id}"
                tiles.append(_tile(path, episode.task, caption, *outcome))
    if not tiles:
        raise EmbodyError(f"{history.folder} has no recordings; evaluate with video=failures, first:N or all.")
    width, height = max(t.width for t in tiles) + _GAP, tiles[0].height + _GAP
    rows = -(-len(tiles) // _COLUMNS)
    sheet = Image.new("RGB", (width * min(len(tiles), _COLUMNS) + _GAP, height * rows + _GAP), _PAPER)
    for k, tile in enumerate(tiles):
        sheet.paste(tile, (_GAP + k % _COLUMNS * width, _GAP + k // _COLUMNS * height))
    try:
        sheet.save(out)
    except (OSError, ValueError) as error:
        raise EmbodyError(f"Cannot write {out}: {error}. Choose another --sheet FILE.png.") from error
    return len(tiles)


def _tile(path: Path, task: str, caption: str, outcome: str, color: tuple[int, int, int]) -> Image.Image:
    frames = [Image.fromarray(frame) for frame in _imageio.mimread(path, memtest=False)]
    shown = [frames[0], frames[len(frames) // 2], frames[-1]]
    shown = [f.resize((round(f.width * _HEIGHT / f.height), _HEIGHT)) for f in shown]
    tile = Image.new("RGB", (sum(f.width for f in shown), _HEIGHT + _TEXT), _PAPER)
    for k, frame in enumerate(shown):
        tile.paste(frame, (k * frame.width, _TEXT))
    draw, font = ImageDraw.Draw(tile), ImageFont.load_default(14)
    draw.text((0, 0), task[: tile.width // 8], fill=_INK, font=font)
    draw.text((0, 18), outcome, fill=color, font=font)
    draw.text((64, 18), caption, fill=_INK, font=font)
    return tile
