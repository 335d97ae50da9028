"""Encoding and decoding of frames: lossless PNG, or MP4."""

import io
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from embodyrl.data.layout import get_pixel_format
from embodyrl.errors import EmbodyError
from embodyrl.text.images import get_upright_size, open_image
from embodyrl.types import ByteArray, IntArray

_LISTING_TIMEOUT_S = 120.0
"""Time limit for listing the frame times of a video, in seconds."""
MP4_ONLY = ["-f", "mov", "-protocol_whitelist", "file"]
"""Options of ffmpeg for files from untrusted sources: without them, a playlist could name files outside the folder."""
_MAX_FRAMES = 1 << 21
"""Maximum number of frames of a video; a small file can declare any number."""
_MAX_TIME_DEVIATION = 0.4
"""Maximum deviation of a frame time from equal spacing, in frame intervals."""


def encode_png(frame: ByteArray) -> bytes:
    """Encode a frame [H, W, 3] uint8 as PNG, with fast compression."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def decode_png(content: bytes, out: ByteArray) -> None:
    """Decode an image file into `out` [H, W, 3].

    Raises:
        EmbodyError: the file is not an image, or has another size (checked before decoding).
    """
    try:
        with open_image(content) as image:
            actual, declared = get_upright_size(image), out.shape[:2]
            if actual != declared:
                raise EmbodyError(
                    f"The frame is {actual[0]}x{actual[1]} (height x width), expected "
                    f"{declared[0]}x{declared[1]}. Correct the shape in meta/info.json, or write frames of one size."
                )
            if image.mode.startswith(("I", "F")):
                raise EmbodyError(f"The frame is probably a depth map (mode {image.mode}). Choose color cameras.")
            out[...] = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except ValueError as error:
        raise EmbodyError(f"The frame cannot be decoded: {error}. Download or collect the data set again.") from error


def encode_mp4(frames: Sequence[ByteArray], fps: float, path: Path) -> None:
    """Concatenate the parts [T, H, W, 3] of a video, and write it as H.264.

    Raises:
        EmbodyError: the encoder failed.
    """
    stacked = np.concatenate(frames)
    try:
        iio.imwrite(
            path,
            stacked,
            plugin="FFMPEG",
            fps=fps,
            codec="libx264",
            macro_block_size=1,  # do not resize
            pixelformat=get_pixel_format(stacked.shape[1:3]),
            # Every second frame is a key frame, like in lerobot: loaders read single frames in any order.
            output_params=["-crf", "18", "-g", "2"],
        )
    except (OSError, RuntimeError) as error:
        raise EmbodyError(f"The video {path} cannot be encoded: {error}. Set collect.images=png.") from error


def read_frame_times(path: Path, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return the times [n] of a video's frames in seconds after the first frame; frames are not decoded.

    Raises:
        EmbodyError: the file is missing or unreadable, its frames are not of `size` (height, width), or its frame rate
            is variable.
    """
    import imageio_ffmpeg  # imported here, because commands without videos also import this module

    if not path.is_file():
        raise EmbodyError(f"The video {path} is missing. Download or collect the data set again.")
    try:
        # The first item describes the file; no frame is decoded for it.
        meta = next(frames := imageio_ffmpeg.read_frames(str(path), input_params=MP4_ONLY))
        frames.close()
        width, height = meta["size"]
    except (OSError, RuntimeError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise EmbodyError(f"{path} cannot be read: {reason}. Download or collect the data set again.") from error
    if (height, width) != size:
        raise EmbodyError(
            f"{path} has frames of {height}x{width}, but the data set declares {size[0]}x{size[1]}. "
            "Correct the shape in meta/info.json, or encode the video again."
        )
    return _list_frame_times(path, imageio_ffmpeg.get_ffmpeg_exe())


def _list_frame_times(path: Path, program: str) -> npt.NDArray[np.float64]:
    command = [program, "-v", "error", *MP4_ONLY, "-i", str(path), "-map", "0:v:0", "-c", "copy"]
    command += ["-frames:v", str(_MAX_FRAMES), "-f", "framecrc", "-"]
    quiet = subprocess.DEVNULL
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=quiet, stdin=quiet, timeout=_LISTING_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbodyError(
            f"The frame times of {path} cannot be read: {error}. Download or collect the data set again."
        ) from error
    text = process.stdout.decode(errors="replace")
    base = re.search(r"^#tb 0: (\d+)/(\d+)$", text, re.MULTILINE)
    lines = (line.split(",") for line in text.splitlines() if line[:1] != "#")
    times = np.sort(np.fromiter((line[2] for line in lines if len(line) > 2), np.float64))
    if base is None or not len(times):
        raise EmbodyError(f"{path} cannot be read: the video has no frames. Download or collect the data set again.")
    if len(times) == _MAX_FRAMES:
        raise EmbodyError(f"{path} has {_MAX_FRAMES} frames or more. Split the video into several files.")
    times = (times - times[0]) * int(base[1]) / int(base[2])
    if len(times) < 3:
        return times
    even = np.linspace(times[0], times[-1], len(times))
    step = even[1] - even[0]
    displaced = np.flatnonzero(np.abs(times - even) > _MAX_TIME_DEVIATION * step)
    if len(displaced):
        raise EmbodyError(
            f"{path} has a variable frame rate: frame {displaced[0]} is off by "
            f"{(times - even)[displaced[0]] / step:+.1f} frames. Encode the video with the frame rate of "
            "meta/info.json."
        )
    return times


def decode_mp4(path: Path, numbers: IntArray, outs: Sequence[ByteArray]) -> None:
    """Decode selected frames of a video.

    Args:
        path: the file.
        numbers: [n] indices of the frames to decode, ascending, from 0.
        outs: [n] output arrays [H, W, 3].

    Raises:
        EmbodyError: the file is unreadable or too short, or has frames of another size.
    """
    frame_number = num_decoded = 0
    try:
        # Without this option, frames are repeated or dropped to reach the rate in the header.
        passthrough = ["-fps_mode", "passthrough"]
        for frame in iio.imiter(path, plugin="FFMPEG", input_params=MP4_ONLY, output_params=passthrough):
            while num_decoded < len(outs) and numbers[num_decoded] == frame_number:
                if frame.shape != outs[num_decoded].shape:
                    raise EmbodyError(
                        f"{path} has frames of shape {frame.shape}, but the data set declares "
                        f"{outs[num_decoded].shape}. Encode the video again."
                    )
                outs[num_decoded][...] = frame
                num_decoded += 1
            frame_number += 1
            if num_decoded == len(outs):
                break
    except (OSError, RuntimeError) as error:
        raise EmbodyError(f"{path} cannot be decoded: {error}. Download or collect the data set again.") from error
    if num_decoded < len(outs):
        raise EmbodyError(
            f"{path} contains {frame_number} frames, but the data set declares {int(numbers[-1]) + 1}. Download or "
            "collect the data set again."
        )
