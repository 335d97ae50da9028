"""Frames to bytes and back: lossless PNG, or MP4."""

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import imageio.v3 as iio
import numpy as np
from PIL import Image

from embodyrl.errors import EmbodyError
from embodyrl.types import ByteArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2
"""PNG filter: each byte minus the one above it."""
_FAST = 1


def encode_png(frame: ByteArray) -> bytes:
    """Encode [H, W, 3] uint8 losslessly.

    Written here because zlib lets other threads run while it compresses, which image libraries do not.
    """
    height, width, _ = frame.shape
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = _UP
    flat = frame.reshape(height, 3 * width)
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), _FAST)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def decode_png(content: bytes, out: ByteArray) -> None:
    """Decode any image file into `out` [H, W, 3].

    Raises:
        EmbodyError: it is no image, or has another size.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise EmbodyError(f"A frame cannot be decoded: {error}. The data set is damaged; collect it again.") from error
    if pixels.shape != out.shape:
        raise EmbodyError(f"A frame has shape {pixels.shape}, the data set declares {out.shape}.")
    out[...] = pixels


def encode_mp4(frames: Sequence[ByteArray], fps: int, path: Path) -> None:
    """Write [T, H, W, 3] parts one after the other as H.264; frame sizes must be even.

    Raises:
        EmbodyError: the encoder failed.
    """
    try:
        iio.imwrite(
            path,
            np.concatenate(frames),
            plugin="FFMPEG",
            fps=fps,
            codec="libx264",
            macro_block_size=2,
            output_params=["-crf", "18", "-g", "2"],
        )
    except (OSError, RuntimeError) as error:
        raise EmbodyError(f"Cannot encode {path}: {error}. Use collect.images=png.") from error


def decode_mp4(path: Path, out: ByteArray) -> None:
    """Decode all frames of a file into `out` [T, H, W, 3].

    Raises:
        EmbodyError: unreadable, or another number or size of frames.
    """
    count = 0
    try:
        for frame in iio.imiter(path, plugin="FFMPEG"):
            if count < len(out):
                if frame.shape != out.shape[1:]:
                    raise EmbodyError(f"{path} has frames of {frame.shape}, the data set declares {out.shape[1:]}.")
                out[count] = frame
            count += 1
    except (OSError, RuntimeError) as error:
        raise EmbodyError(f"{path} cannot be decoded: {error}. Fetch or collect the data set again.") from error
    if count != len(out):
        raise EmbodyError(f"{path} holds {count} frames, the data set declares {len(out)}. Collect it again.")
