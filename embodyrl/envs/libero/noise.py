"""Image corruptions of LIBERO-Plus for 256 x 256 images, pixel-identical: five kinds with ten severities each.

The kinds are those of ImageNet-C (arXiv 1903.12261). Random numbers come from `rng` in the benchmark's order.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage as _ndimage  # pyright: ignore[reportMissingImports]

from embodyrl.types import ByteArray, DoubleArray

ndimage: Any = _ndimage

SIZE = 256
_SEEN = 224
"""Exclusive upper bound of the row and column indices of pixels that glass blur moves."""


def corrupt(image: ByteArray, noise: int, rng: np.random.RandomState) -> ByteArray:
    """Apply a corruption of LIBERO-Plus to an image [256, 256, 3].

    `noise`: 1-10 motion blur, 11-20 blur, 21-30 zoom blur, 31-40 fog, 41-50 glass blur; higher numbers of a kind are
    stronger.
    """
    assert image.shape == (SIZE, SIZE, 3), image.shape
    kind, severity = divmod(noise - 1, 10)
    return _KINDS[kind](image, severity, rng)


def resized(image: ByteArray, height: int, width: int) -> ByteArray:
    """Resize an image, averaging the pixels that each new pixel covers."""
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))


_Kind = Callable[[ByteArray, int, np.random.RandomState], ByteArray]


def _motion(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    """Apply ImageMagick 6's motion blur (16 bits per channel): one-sided Gaussian along a line, with repeated edges."""
    radius = (5, 8, 10, 12, 15, 18, 20, 25, 30, 35)[severity]
    sigma = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20)[severity]
    angle = np.radians(rng.uniform(-45, 45))
    along = np.arange(2 * radius + 1)
    kernel = np.exp(-(along**2) / (2.0 * sigma**2))
    kernel /= kernel.sum()
    down, right = (np.ceil(along * part - 0.5).astype(int) for part in (np.sin(angle), np.cos(angle)))
    places = np.arange(SIZE)
    blurred = np.zeros(image.shape)
    for weight, dy, dx in zip(kernel, down, right, strict=True):
        rows, columns = (np.clip(places + shift, 0, SIZE - 1) for shift in (dy, dx))
        blurred += weight * 257.0 * image[rows[:, None], columns]
    return (np.floor(blurred + 0.5) // 257).astype(np.uint8)


def _gaussian(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    return _bytes(_blur(image / 255.0, severity + 1))


def _zoom(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    """Average the image with enlarged copies of itself."""
    most = (1.11, 1.16, 1.21, 1.26, 1.31, 1.36, 1.41, 1.46, 1.51, 1.56)[severity]
    step = (0.01, 0.01, 0.02, 0.02, 0.03, 0.01, 0.01, 0.02, 0.02, 0.03)[severity]
    picture = (image / 255.0).astype(np.float32)
    factors, total = np.arange(1, most, step), np.zeros_like(picture)
    for factor in factors:
        size = int(np.ceil(SIZE / float(factor)))
        first = (SIZE - size) // 2
        part = picture[first : first + size, first : first + size]
        larger = ndimage.zoom(part, (factor, factor, 1), order=1)
        margin = (larger.shape[0] - SIZE) // 2
        total += larger[margin : margin + SIZE, margin : margin + SIZE]
    return _bytes((picture + total) / (len(factors) + 1))


def _fog(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    thickness = 0.5 * (severity + 1)
    picture = image / 255.0
    brightest = picture.max()
    picture += thickness * _plasma((3, 2.8, 2.5, 2.2, 2.0, 1.8, 1.6, 1.5, 1.4, 1.3)[severity], rng)[..., None]
    return _bytes(picture * brightest / (brightest + thickness))


def _plasma(decay: float, rng: np.random.RandomState) -> DoubleArray:
    """Return heights [256, 256] in 0..1 by the diamond-square algorithm with wrap-around."""
    heights = np.empty((SIZE, SIZE))
    heights[0, 0] = 0
    step, roughness = SIZE, 100.0

    def rough(total: DoubleArray) -> DoubleArray:
        return total / 4 + roughness * rng.uniform(-roughness, roughness, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        total = corners + np.roll(corners, -1, axis=0)
        total += np.roll(total, -1, axis=1)
        heights[half::step, half::step] = rough(total)
        centres = heights[half::step, half::step]
        beside = corners + np.roll(corners, -1, axis=1)
        heights[::step, half::step] = rough((centres + np.roll(centres, 1, axis=0)) + beside)
        below = corners + np.roll(corners, -1, axis=0)
        heights[half::step, ::step] = rough((centres + np.roll(centres, 1, axis=1)) + below)
        step, roughness = half, roughness / decay
    heights -= heights.min()
    return heights / heights.max()


def _glass(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    """Apply glass blur: blur, replace pixels with neighbouring pixels, and blur again.

    The original code overwrites the second pixel of a swap before reading it, so that pixels are copied, not swapped.
    """
    sigma = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 1.8, 2.2, 2.5)[severity]
    reach = (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)[severity]
    times = (3, 3, 3, 2, 2, 2, 2, 2, 1, 1)[severity]
    pixels = np.uint8(_blur(image / 255.0, sigma) * 255).reshape(-1, 3)
    sources = list(range(SIZE * SIZE))
    span = range(_SEEN - reach, reach, -1)
    for _ in range(times):
        shifts = rng.randint(-reach, reach, size=(len(span) ** 2, 2)) @ [1, SIZE]
        places = (np.array(span)[:, None] * SIZE + np.array(span)).ravel()
        for place, shift in zip(places.tolist(), shifts.tolist(), strict=True):
            sources[place] = sources[place + shift]
    return _bytes(_blur(pixels[sources].reshape(image.shape) / 255.0, sigma))


_KINDS: tuple[_Kind, ...] = (_motion, _gaussian, _zoom, _fog, _glass)


def _blur(picture: DoubleArray, sigma: float) -> DoubleArray:
    return ndimage.gaussian_filter(picture, (sigma, sigma, 0), mode="nearest")


def _bytes(picture: DoubleArray) -> ByteArray:
    return (np.clip(picture, 0, 1) * 255).astype(np.uint8)
