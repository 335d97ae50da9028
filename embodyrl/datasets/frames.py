"""Frames to bytes and back: lossless PNG, or MP4."""

import io
from collections.abc import Sequence
from pathlib import Path

import imageio.v3 as iio
import numpy as np
from PIL import Image

from embodyrl.errors import EmbodyError
from embodyrl.types import ByteArray


def encode_png(frame: ByteArray) -> bytes:
    """Encode [H, W, 3] uint8 losslessly, quickly rather than small."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


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
            # A key frame every second frame, as lerobot has it: loaders look up single frames in any order.
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
            # Counted to the end all the same: how many there are tells a cut file from one of another data set.
            if count < len(out):
                if frame.shape != out.shape[1:]:
                    raise EmbodyError(f"{path} has frames of {frame.shape}, the data set declares {out.shape[1:]}.")
                out[count] = frame
            count += 1
    except (OSError, RuntimeError) as error:
        raise EmbodyError(f"{path} cannot be decoded: {error}. Fetch or collect the data set again.") from error
    if count != len(out):
        raise EmbodyError(f"{path} holds {count} frames, the data set declares {len(out)}. Collect it again.")
