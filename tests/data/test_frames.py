"""Images and videos of other programs: data larger than declared are rejected before decoding."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embodyrl.data import frames
from embodyrl.data.frames import decode_mp4, decode_png, encode_mp4, encode_png, read_frame_times
from embodyrl.errors import EmbodyError

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
def test_unsupported_images_are_rejected(content):
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


def test_video_of_wrong_size_is_rejected_after_reading_its_header(tmp_path: Path):
    encode_mp4([np.zeros((4, 48, 64, 3), np.uint8)], 10.0, tmp_path / "a.mp4")
    np.testing.assert_allclose(read_frame_times(tmp_path / "a.mp4", (48, 64)), [0.0, 0.1, 0.2, 0.3])
    with pytest.raises(EmbodyError, match=r"frames of 48x64, but the data set declares 64x48"):
        read_frame_times(tmp_path / "a.mp4", (64, 48))
    (tmp_path / "b.mp4").write_bytes((tmp_path / "a.mp4").read_bytes()[:200])
    for name, reason in (("b.mp4", "cannot be read"), ("c.mp4", "is missing")):
        with pytest.raises(EmbodyError, match=reason):
            read_frame_times(tmp_path / name, (48, 64))


def test_video_is_not_decoded_beyond_its_declared_frames(tmp_path: Path):
    """A small file can contain hours of equal frames."""
    encode_mp4([np.zeros((50, 16, 16, 3), np.uint8)], 10.0, tmp_path / "a.mp4")
    outs = [np.ones((16, 16, 3), np.uint8) for _ in range(2)]
    decode_mp4(tmp_path / "a.mp4", np.arange(2), outs)
    assert not np.any(outs)
    with pytest.raises(EmbodyError, match="contains 50 frames, but the data set declares 51"):
        decode_mp4(tmp_path / "a.mp4", np.array([50]), outs[:1])


@pytest.mark.parametrize("size", [(55, 57), (1, 3), (56, 31), (31, 56), (16, 16)])
def test_videos_of_any_size_round_trip(tmp_path: Path, size: tuple[int, int]):
    images = np.linspace(0, 250, 3 * size[0] * size[1] * 3).reshape(3, *size, 3).astype(np.uint8)
    encode_mp4([images], 10.0, tmp_path / "a.mp4")
    assert len(read_frame_times(tmp_path / "a.mp4", size)) == 3
    outs = np.zeros_like(images)
    decode_mp4(tmp_path / "a.mp4", np.arange(3), [*outs])
    assert np.abs(outs.astype(int) - images).mean() < 4


DASH = (
    '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT1S" '
    'profiles="urn:mpeg:dash:profile:isoff-main:2011"><Period><AdaptationSet mimeType="video/mp4"><Representation '
    'id="1" bandwidth="1" codecs="avc1"><BaseURL>{file}</BaseURL></Representation></AdaptationSet></Period></MPD>'
)


@pytest.mark.parametrize(
    "content",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{file}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {file}\n",
        DASH,
    ],
    ids=["playlist", "concat", "dash"],
)
def test_video_file_cannot_reference_other_files(tmp_path: Path, content: str):
    images = np.zeros((4, 48, 64, 3), np.uint8)
    encode_mp4([images], 10.0, tmp_path / "own.mp4")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.mp4").symlink_to(tmp_path / "own.mp4")
    path = tmp_path / "data" / "a.mp4"
    for named in (str(tmp_path / "own.mp4"), "../own.mp4", f"file://{tmp_path}/own.mp4", "link.mp4"):
        path.write_text(content.format(file=named))
        with pytest.raises(EmbodyError, match="cannot be"):
            read_frame_times(path, (48, 64))
        with pytest.raises(EmbodyError, match="cannot be decoded"):
            decode_mp4(path, np.arange(4), [*images])


def test_number_of_frames_of_a_video_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    encode_mp4([np.zeros((50, 16, 16, 3), np.uint8)], 10.0, tmp_path / "a.mp4")
    monkeypatch.setattr(frames, "_MAX_FRAMES", 50)
    with pytest.raises(EmbodyError, match="has 50 frames or more"):
        read_frame_times(tmp_path / "a.mp4", (16, 16))
    monkeypatch.setattr(frames, "_MAX_FRAMES", 51)
    assert len(read_frame_times(tmp_path / "a.mp4", (16, 16))) == 50


@pytest.mark.integration
def test_export_of_a_run_imports_no_video_reader() -> None:
    code = "import sys, embodyrl.commands.export; assert 'imageio_ffmpeg' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
