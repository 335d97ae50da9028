"""Recording of an episode as an MP4 file that common players support."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from embodyrl.envs.video import remove_videos
from embodyrl.errors import EmbodyError
from embodyrl.types import ByteArray

MIN_WIDTH = 160
"""Minimum width of a video in pixels; the pixels of smaller frames are repeated, so that the text is readable."""

FONT_SIZE = 22
"""Font size for frames of at least `_REFERENCE_WIDTH` pixels; smaller in proportion for smaller frames."""
_REFERENCE_WIDTH, _SMALLEST_FONT = 512, 10
_MARGIN = 10
_BAND_COLOR, _TEXT_COLOR, _SUCCESS_COLOR, _FAILURE_COLOR = (24, 24, 28), (235, 235, 235), (80, 220, 110), (235, 90, 80)
_HUMAN_COLOR = (242, 163, 60)
_MIN_DURATION_S = 4.0
"""Minimum duration of the video of an episode with `horizon` steps, in seconds."""
_LAST_FRAME_S = 1.0
"""Duration of the last frame, which shows the outcome, in seconds."""
_FAILURES = (OSError, RuntimeError, ValueError)
"""Errors that imageio raises if ffmpeg is missing, the disk is full, or the folder is not writable."""


class VideoError(EmbodyError):
    """Raised if a video cannot be written; the incomplete file is removed."""


class VideoRecorder:
    """Encodes frames into a temporary MP4 file (H.264, yuv420p); `finish` renames the file.

    With `info`, the instruction is above the image, and the step and a success mark are below the image. The video ends
    with a still frame and the colored outcome. If episodes of at most `horizon` steps would be too short to watch,
    each frame is repeated.
    """

    def __init__(
        self, path_stem: Path, fps: int, instruction: str, info: bool, *, horizon: int = 0, reports_success: bool = True
    ) -> None:
        """Start the encoder; `reports_success` is True if the environment reports success."""
        remove_videos(path_stem)
        self._path_stem = path_stem
        self._partial = path_stem.with_name(path_stem.name + ".partial.mp4")
        self._instruction = instruction
        self._info = info
        self._reports_success = reports_success
        self._fps = fps
        self._repeats = max(1, math.ceil(_MIN_DURATION_S * fps / horizon)) if info and horizon else 1
        self._writer: Any = None
        self._shape: tuple[int, ...] = ()
        self._canvas: ByteArray | None = None
        self._frames = self._written = 0
        self._last: ByteArray | None = None
        self._actor, self._highlighted = "", False
        self.success = False
        """True if the goal was reached in any frame."""

    def add(self, frame: ByteArray, success: bool, *, actor: str = "", highlighted: bool = False) -> None:
        """Append the frame of the next env step, [H, W, 3] uint8.

        `success` is True if the goal is reached. `actor` is the source of the action, which is named below the image,
        on a colored band if `highlighted`.

        Raises:
            VideoError: the frame and the first frame have different shapes, or the encoder failed.
        """
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            self._fail(f"frame {self._frames} is {frame.dtype} {frame.shape}, but must be uint8 (H, W, 3)")
        if self._shape and frame.shape != self._shape:
            self._fail(f"frame {self._frames} has shape {frame.shape}, the first one had {self._shape}")
        self._shape, self._scale = frame.shape, max(1, -(-MIN_WIDTH // frame.shape[1]))
        self.success |= success
        # Simulators may render the next frame into the same memory.
        self._last = frame.copy()
        self._frames += 1
        self._actor, self._highlighted = actor, highlighted
        self._write(self._compose(frame), self._repeats)

    def finish(self) -> Path:
        """Complete the file and return its path `<stem>_<success or fail>_<n>steps.mp4`.

        Raises:
            VideoError: no frame was added, or the encoder failed.
        """
        if self._writer is None:
            self._fail("no frame was added")
        if self._info and self._last is not None:
            self._write(self._compose(self._last, at_end=True), math.ceil(_LAST_FRAME_S * self._fps))
        outcome = "success" if self.success else "fail"
        target = self._path_stem.with_name(f"{self._path_stem.name}_{outcome}_{self._frames}steps.mp4")
        try:
            self._close()
            import imageio_ffmpeg

            # An encoder may exit without an error on a full disk, so count its frames.
            num_written = imageio_ffmpeg.count_frames_and_secs(str(self._partial))[0] or 0
            if num_written != self._written:
                self._fail(f"only {num_written} of {self._written} frames were written; is the disk full?")
            # The name contains the outcome, which is known only at the end.
            os.replace(self._partial, target)
        except _FAILURES as error:
            self._fail(_get_first_line(error), error)
        return target

    def discard(self) -> None:
        """Stop the encoder and delete the incomplete file; idempotent."""
        # Encoder or folder may no longer exist; errors of a discarded recording are irrelevant.
        with contextlib.suppress(*_FAILURES):
            self._close()
        with contextlib.suppress(OSError):
            self._partial.unlink()

    def _write(self, image: ByteArray, count: int) -> None:
        try:
            if self._writer is None:
                self._writer = self._open()
            for _ in range(count):
                self._writer.append_data(image)
        except _FAILURES as error:
            self._fail(_get_first_line(error), error)
        self._written += count

    def _open(self) -> Any:
        import imageio

        self._partial.parent.mkdir(parents=True, exist_ok=True)
        return imageio.get_writer(
            self._partial,
            format="FFMPEG",  # type: ignore[arg-type]
            mode="I",
            fps=self._fps,
            codec="libx264",
            pixelformat="yuv420p",
            macro_block_size=2,
            ffmpeg_log_level="error",
            # One thread: the simulators need the other cores.
            output_params=["-threads", "1", "-preset", "veryfast", "-movflags", "+faststart"],
        )

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _fail(self, reason: str, cause: Exception | None = None) -> NoReturn:
        self.discard()
        raise VideoError(
            f"video '{self._partial}' was not written: {reason}. Check the free space and the permissions of the "
            f"folder (video_cfg.base_dir), or set video=none."
        ) from cause

    def _compose(self, frame: ByteArray, *, at_end: bool = False) -> ByteArray:
        # Pixels are repeated: interpolation takes longer than the simulation of many environments.
        frame = frame.repeat(self._scale, 0).repeat(self._scale, 1)
        if self._canvas is None:
            self._canvas = self._draw_caption(*frame.shape[:2])
        canvas, (height, width) = self._canvas.copy(), frame.shape[:2]
        band = canvas[self._frame_offset + height :]
        canvas[self._frame_offset : self._frame_offset + height, :width] = frame
        if self._info:
            band[:] = self._draw_band(band.shape[0], band.shape[1], at_end=at_end)
        return canvas

    def _draw_caption(self, height: int, width: int) -> ByteArray:
        """Return an image with the instruction above an empty area of this size."""
        from PIL import Image, ImageDraw, ImageFont

        size = min(FONT_SIZE, max(_SMALLEST_FONT, FONT_SIZE * width // _REFERENCE_WIDTH))
        self._font, line, self._margin = ImageFont.load_default(size), size + 8, min(_MARGIN, size // 2)
        lines = self._wrap(width) if self._info else []
        self._frame_offset, bottom = (len(lines) * line + self._margin, line + self._margin) if self._info else (0, 0)
        # yuv420p stores color for blocks of 2x2 pixels, so both sides are even.
        total = (width + width % 2, (self._frame_offset + height + bottom + 1) // 2 * 2)
        canvas = Image.new("RGB", total, _BAND_COLOR)
        for row, text in enumerate(lines):
            place = (self._margin, row * line + self._margin // 2)
            ImageDraw.Draw(canvas).text(place, text, fill=_TEXT_COLOR, font=self._font)
        return np.asarray(canvas)

    def _draw_band(self, height: int, width: int, *, at_end: bool) -> ByteArray:
        """Return the band below the image, with the step or the outcome."""
        from PIL import Image, ImageDraw

        background, color, text = (
            _BAND_COLOR,
            _TEXT_COLOR,
            f"step {self._frames}" + f" · {self._actor}" * bool(self._actor),
        )
        if self._highlighted:
            background, color = _HUMAN_COLOR, _BAND_COLOR
        shows_outcome = at_end and (self._reports_success or self.success)
        if shows_outcome:
            background, color = _SUCCESS_COLOR if self.success else _FAILURE_COLOR, _BAND_COLOR
            text = f"{'success' if self.success else 'failure'} after {self._frames} steps"
        band = Image.new("RGB", (width, height), background)
        draw, y = ImageDraw.Draw(band), self._margin // 2
        if self.success and not shows_outcome:
            draw.text((width - self._margin, y), "success", fill=_SUCCESS_COLOR, font=self._font, anchor="ra")
        draw.text((self._margin, y), text, fill=color, font=self._font)
        return np.asarray(band)

    def _wrap(self, width: int) -> list[str]:
        """Split the instruction into lines that fit; a word longer than a line is not split."""
        lines = [""]
        for word in self._instruction.split():
            candidate = f"{lines[-1]} {word}".strip()
            if lines[-1] and self._font.getlength(candidate) > width - 2 * self._margin:
                lines.append(word)
            else:
                lines[-1] = candidate
        return lines


def _get_first_line(error: Exception) -> str:
    """Return the first line of an imageio error; the other lines contain the ffmpeg command."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
