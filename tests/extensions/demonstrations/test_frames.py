"""Images and videos of other programs: data larger than declared are refused before decoding."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embodyrl.errors import EmbodyError
from embodyrl.extensions.demonstrations.frames import decode_png, encode_mp4, encode_png, frame_rate

DECLARED = np.zeros((8, 8, 3), np.uint8)


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.new("1" if kind == "PNG" else "RGB", (width, height)).save(held, kind)
    return held.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        lambda: picture(9000, 9000),
        lambda: picture(60_000, 4000),
        lambda: picture(9, 8),
        lambda: picture(8, 8, "EPS"),
        lambda: picture(8, 8, "PPM"),
        lambda: picture(8, 8)[:45],
        lambda: picture(8, 8).replace(b"IDAT", b"IDAX"),
        lambda: b"",
    ],
    ids=["large", "bomb", "other", "eps", "ppm", "cut", "chunk", "empty"],
)
def test_unsupported_images_are_refused(content):
    made = content()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EmbodyError, match="frame"):
        decode_png(made, DECLARED.copy())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_common_image_formats_are_read(kind):
    out = DECLARED.copy() + 1
    decode_png(picture(8, 8, kind), out)
    assert not out.any()
    noise = np.random.default_rng(0).integers(0, 256, DECLARED.shape, np.uint8)
    decode_png(encode_png(noise), out)
    assert np.array_equal(out, noise)


def test_video_of_another_size_is_refused_by_its_header(tmp_path: Path):
    encode_mp4([np.zeros((4, 48, 64, 3), np.uint8)], 10.0, tmp_path / "a.mp4")
    assert frame_rate(tmp_path / "a.mp4", 10.0, (48, 64)) == 10.0
    with pytest.raises(EmbodyError, match=r"frames of 48x64, but the data set declares 64x48"):
        frame_rate(tmp_path / "a.mp4", 10.0, (64, 48))
    (tmp_path / "b.mp4").write_bytes((tmp_path / "a.mp4").read_bytes()[:200])
    for name in ("b.mp4", "c.mp4"):
        with pytest.raises(EmbodyError, match="cannot be read"):
            frame_rate(tmp_path / name, 10.0, (48, 64))


def test_export_of_a_run_imports_no_video_reader() -> None:
    code = "import sys, embodyrl.extensions.demonstrations.export; assert 'imageio_ffmpeg' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
