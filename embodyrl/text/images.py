"""Images of text rows: files in the data folder, bytes, or pixels."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.errors import ConfigError
from embodyrl.files import inside
from embodyrl.types import ByteArray

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
"""Image formats that Pillow reads without other programs."""
_ORIENTATION = 0x0112  # tag of EXIF
_ROTATED = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""


@contextmanager
def open_image(source: Path | bytes) -> "Iterator[Image]":
    """Open an image file or its content, in one of the formats `FORMATS`.

    Raises:
        ValueError: the content is not an image in these formats, or is damaged.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"the content is not an image in a known format ({', '.join(FORMATS)})") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error


def get_upright_size(image: "Image") -> tuple[int, int]:
    """Return the height and width of an image when turned upright; cameras and phones may store images sideways."""
    is_rotated = image.getexif().get(_ORIENTATION, 1) in _ROTATED
    return (image.width, image.height) if is_rotated else (image.height, image.width)


@dataclass(frozen=True, slots=True)
class LazyImage:
    """Image of a text row, decoded on demand."""

    source: Path | bytes | ByteArray
    where: str
    """Data source and row of the image, for error messages."""
    max_edge: int | None = None
    """Maximum length of the longer edge in pixels; larger images are resized."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, after the reduction to `max_edge`. For a file, only the header is read.

        Raises:
            ConfigError: the content is not an image.
        """
        if isinstance(self.source, np.ndarray):
            return self._fit(*self.source.shape[:2])
        with self._open() as image:
            return self._fit(*get_upright_size(image))

    def pixels(self) -> ByteArray:
        """Return the decoded image [H, W, 3] uint8.

        Raises:
            ConfigError: the content is not an image, or damaged.
        """
        from PIL import Image, ImageOps

        height, width = self.size
        with self._open() as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            return np.asarray(upright.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0))

    def _fit(self, height: int, width: int) -> tuple[int, int]:
        scale = min(1.0, (self.max_edge or max(height, width)) / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    @contextmanager
    def _open(self) -> "Iterator[Image]":
        from PIL import Image

        try:
            if isinstance(self.source, np.ndarray):
                yield Image.fromarray(self.source)
                return
            with open_image(self.source) as image:
                yield image
        except ValueError as error:
            raise ConfigError(
                f"{self.where}: the image cannot be read: {error}. Replace the image, or remove the row."
            ) from error


def read_images(value: Any, folder: Path | None, where: str, max_edge: int | None) -> tuple[LazyImage, ...]:
    """Return the images in a column: one image or a list, each as a file in `folder`, bytes, or pixels.

    An image may also be a mapping with `bytes` or `path`, as Hugging Face data sets store it.

    Args:
        value: content of the column.
        folder: folder that must contain the image files; None: paths from a user function are not restricted.
        where: source and row, for error messages.
        max_edge: maximum length of the longer edge in pixels.

    Raises:
        ConfigError: the value has another type, or a file is outside the folder.
    """
    values = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    return tuple(LazyImage(_get_source(item, folder, where), where, max_edge) for item in values)


def _get_source(value: Any, folder: Path | None, where: str) -> Path | bytes | ByteArray:
    if isinstance(value, LazyImage):
        return value.source
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, (str, Path)) and "://" not in str(value):
        try:
            return Path(value) if folder is None else inside(folder, value)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{where}: the image {error}. Copy the image into the folder of the rows and use its relative path, or "
                "store its bytes in the column."
            ) from error
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,) and value.size:
        return value
    raise ConfigError(
        f"{where}: an image must be a local file, bytes or a uint8 array [H, W, 3], but is {str(value)[:60]!r}."
    )
