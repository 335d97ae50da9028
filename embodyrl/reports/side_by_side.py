"""Animation of two recordings of an episode side by side, before and after training."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import imageio.v2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from embodyrl.data.frames import MP4_ONLY
from embodyrl.files import replace_atomically

_imageio: Any = imageio.v2  # its readers are typed too narrowly

_BAND = 34
_GAP = 8
_GIF_FPS, _GIF_WIDTH, _GIF_COLORS = 8, 640, 128
_TEXT_COLOR, _BACKGROUND = (235, 235, 235), (24, 24, 28)


def animate(pairs: Sequence[tuple[Path, Path]], out: Path, *, labels: tuple[str, str]) -> None:
    """Write an animated GIF of pairs of videos, one pair after the other; the shorter video repeats its last frame.

    Raises:
        OSError: a recording cannot be read, or `out` cannot be written.
    """
    frames: list[Image.Image] = []
    for before, after in pairs:
        with _open_mp4(before) as left, _open_mp4(after) as right:
            stride = max(1, round(left.get_meta_data()["fps"] / _GIF_FPS))
            for number, pair in enumerate(_zip_frames(iter(left), iter(right))):
                if number % stride == 0:
                    image = Image.fromarray(_compose(pair, labels))
                    size = (_GIF_WIDTH, round(_GIF_WIDTH * image.height / image.width))
                    frames.append(image.resize(size, Image.Resampling.LANCZOS))
    # One palette for all frames, so that a frame contains only the changed pixels.
    samples = np.concatenate([np.asarray(frame) for frame in frames[:: max(1, len(frames) // 12)]])
    palette = Image.fromarray(samples).quantize(_GIF_COLORS, method=Image.Quantize.MAXCOVERAGE)
    quantized = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(out) as scratch:
        quantized[0].save(scratch, save_all=True, append_images=quantized[1:], duration=1000 // _GIF_FPS, loop=0)


def _open_mp4(path: Path) -> Any:
    try:
        return _imageio.get_reader(path, "FFMPEG", input_params=MP4_ONLY)
    except OSError as error:  # the output of ffmpeg
        raise OSError(f"{path} cannot be read as MP4") from error


def _zip_frames(left: Iterator[np.ndarray], right: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    a = b = None
    for next_a, next_b in zip_longest(left, right):
        a, b = a if next_a is None else next_a, b if next_b is None else next_b
        if a is None or b is None:
            raise OSError("A recording contains no frames.")
        yield a, b


def _compose(pair: tuple[np.ndarray, np.ndarray], labels: tuple[str, str]) -> np.ndarray:
    height = max(frame.shape[0] for frame in pair)
    width = sum(frame.shape[1] for frame in pair) + _GAP
    canvas = Image.new("RGB", (width, height + _BAND), _BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    x = 0
    for frame, label in zip(pair, labels, strict=True):
        canvas.paste(Image.fromarray(np.asarray(frame)), (x, _BAND))
        draw.text((x + 10, 4), label, fill=_TEXT_COLOR, font=ImageFont.load_default(22))
        x += frame.shape[1] + _GAP
    return np.asarray(canvas)
