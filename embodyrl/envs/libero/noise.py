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
_GLASS_SIZE = 224
"""Glass blur moves only pixels whose row and column indices are below this number."""


def corrupt(image: ByteArray, noise: int, rng: np.random.RandomState) -> ByteArray:
    """Apply a corruption of LIBERO-Plus to an image [256, 256, 3].

    `noise`: 1-10 motion blur, 11-20 blur, 21-30 zoom blur, 31-40 fog, 41-50 glass blur; higher numbers of a kind are
    stronger.
    """
    assert image.shape == (SIZE, SIZE, 3), image.shape
    kind, severity = divmod(noise - 1, 10)
    return _CORRUPTIONS[kind](image, severity, rng)


def resize(image: ByteArray, height: int, width: int) -> ByteArray:
    """Resize an image, averaging the pixels that each new pixel covers."""
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))


_Corruption = Callable[[ByteArray, int, np.random.RandomState], ByteArray]


def _apply_motion_blur(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    """Apply ImageMagick 6's motion blur (16 bits per channel): one-sided Gaussian along a line, edges repeated."""
    radius = (5, 8, 10, 12, 15, 18, 20, 25, 30, 35)[severity]
    sigma = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20)[severity]
    angle = np.radians(rng.uniform(-45, 45))
    offsets = np.arange(2 * radius + 1)
    kernel = np.exp(-(offsets**2) / (2.0 * sigma**2))
    kernel /= kernel.sum()
    down, right = (np.ceil(offsets * part - 0.5).astype(int) for part in (np.sin(angle), np.cos(angle)))
    positions = np.arange(SIZE)
    blurred = np.zeros(image.shape)
    for weight, dy, dx in zip(kernel, down, right, strict=True):
        rows, columns = (np.clip(positions + shift, 0, SIZE - 1) for shift in (dy, dx))
        blurred += weight * 257.0 * image[rows[:, None], columns]
    return (np.floor(blurred + 0.5) // 257).astype(np.uint8)


def _apply_gaussian_blur(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    return _to_bytes(_blur_image(image / 255.0, severity + 1))


def _apply_zoom_blur(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    """Average the image with enlarged copies of itself."""
    max_factor = (1.11, 1.16, 1.21, 1.26, 1.31, 1.36, 1.41, 1.46, 1.51, 1.56)[severity]
    step = (0.01, 0.01, 0.02, 0.02, 0.03, 0.01, 0.01, 0.02, 0.02, 0.03)[severity]
    normalized = (image / 255.0).astype(np.float32)
    factors, total = np.arange(1, max_factor, step), np.zeros_like(normalized)
    for factor in factors:
        size = int(np.ceil(SIZE / float(factor)))
        first = (SIZE - size) // 2
        part = normalized[first : first + size, first : first + size]
        larger = ndimage.zoom(part, (factor, factor, 1), order=1)
        margin = (larger.shape[0] - SIZE) // 2
        total += larger[margin : margin + SIZE, margin : margin + SIZE]
    return _to_bytes((normalized + total) / (len(factors) + 1))


def _apply_fog(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    thickness = 0.5 * (severity + 1)
    normalized = image / 255.0
    brightest = normalized.max()
    normalized += (
        thickness * _generate_plasma((3, 2.8, 2.5, 2.2, 2.0, 1.8, 1.6, 1.5, 1.4, 1.3)[severity], rng)[..., None]
    )
    return _to_bytes(normalized * brightest / (brightest + thickness))


def _generate_plasma(decay: float, rng: np.random.RandomState) -> DoubleArray:
    """Return heights [256, 256] in 0..1 by the diamond-square algorithm with wrap-around."""
    heights = np.empty((SIZE, SIZE))
    heights[0, 0] = 0
    step, roughness = SIZE, 100.0

    def add_noise(total: DoubleArray) -> DoubleArray:
        return total / 4 + roughness * rng.uniform(-roughness, roughness, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        total = corners + np.roll(corners, -1, axis=0)
        total += np.roll(total, -1, axis=1)
        heights[half::step, half::step] = add_noise(total)
        centers = heights[half::step, half::step]
        horizontal = corners + np.roll(corners, -1, axis=1)
        heights[::step, half::step] = add_noise((centers + np.roll(centers, 1, axis=0)) + horizontal)
        vertical = corners + np.roll(corners, -1, axis=0)
        heights[half::step, ::step] = add_noise((centers + np.roll(centers, 1, axis=1)) + vertical)
        step, roughness = half, roughness / decay
    heights -= heights.min()
    return heights / heights.max()


def _apply_glass_blur(image: ByteArray, severity: int, rng: np.random.RandomState) -> ByteArray:
    """Apply glass blur: blur, replace pixels with neighboring pixels, and blur again.

    The original code overwrites the second pixel of a swap before reading it, so that pixels are copied, not swapped.
    """
    sigma = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 1.8, 2.2, 2.5)[severity]
    max_shift = (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)[severity]
    num_passes = (3, 3, 3, 2, 2, 2, 2, 2, 1, 1)[severity]
    pixels = np.uint8(_blur_image(image / 255.0, sigma) * 255).reshape(-1, 3)
    sources = list(range(SIZE * SIZE))
    coordinates = range(_GLASS_SIZE - max_shift, max_shift, -1)
    for _ in range(num_passes):
        shifts = rng.randint(-max_shift, max_shift, size=(len(coordinates) ** 2, 2)) @ [1, SIZE]
        positions = (np.array(coordinates)[:, None] * SIZE + np.array(coordinates)).ravel()
        for position, shift in zip(positions.tolist(), shifts.tolist(), strict=True):
            sources[position] = sources[position + shift]
    return _to_bytes(_blur_image(pixels[sources].reshape(image.shape) / 255.0, sigma))


_CORRUPTIONS: tuple[_Corruption, ...] = (
    _apply_motion_blur,
    _apply_gaussian_blur,
    _apply_zoom_blur,
    _apply_fog,
    _apply_glass_blur,
)


def _blur_image(normalized: DoubleArray, sigma: float) -> DoubleArray:
    return ndimage.gaussian_filter(normalized, (sigma, sigma, 0), mode="nearest")


def _to_bytes(normalized: DoubleArray) -> ByteArray:
    return (np.clip(normalized, 0, 1) * 255).astype(np.uint8)
