"""Image augmentation of demonstrations: the official OpenVLA fine-tuning recipe on uint8 frames, on any device.

Brightness +-0.2, contrast and saturation 0.8 to 1.2, hue +-0.05, in this order, and a random crop of 0.9 of the area.
The crop is implemented as a shift: a frame shifted by up to half the crop margin, and then cropped at its
center as in the official evaluation, equals a random crop. If evaluation does not crop, training and evaluation
frames have the same scale.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.tensors import to_device
from embodyrl.types import ByteArray

BRIGHTNESS = 0.2
CONTRAST = (0.8, 1.2)
SATURATION = (0.8, 1.2)
HUE = 0.05
"""Maximum hue rotation, as a fraction of the full circle."""
CROP_AREA = 0.9


def sample_random_numbers(count: int, seed: int) -> Tensor:
    """Sample the uniform random numbers [6, count] that determine the augmentation of `count` frames."""
    return torch.rand(6, count, generator=torch.Generator().manual_seed(seed))


def sample_augmentations(seeds: Sequence[int], count: int, size: int, images: int, steps: int) -> Tensor:
    """Sample the random numbers [6, count, images] that determine the augmentation of `count` training samples.

    Args:
        seeds: seed of each part of `size` samples.
        count: number of samples.
        size: number of samples per seed.
        images: number of images per sample, cameras times `steps`.
        steps: number of observation steps per sample. All steps of a camera get the same numbers, so that only the
            scene moves between them.
    """
    cameras = images // steps
    sizes = [min(size, count - start) for start in range(0, count, size)]
    samples = [
        sample_random_numbers(part_size * cameras, seed).unflatten(1, (part_size, cameras))
        for part_size, seed in zip(sizes, seeds, strict=True)
    ]
    return torch.cat(samples, 1).repeat(1, 1, steps)


def augment(images: ByteArray, draws: Tensor, device: torch.device) -> ByteArray:
    """Augment each frame with the recipe of this module; frames with equal random numbers are changed equally.

    Args:
        images: [B, C, H, W, 3] uint8.
        draws: [6, B, C] in [0, 1), see `sample_augmentations`.
        device: device of the computation.

    Returns:
        New frames of the same shape and type.
    """
    frames = to_device(np.ascontiguousarray(images), device).flatten(0, 1)
    draws = to_device(draws.flatten(1), device)
    # A CPU cache holds the intermediate results of one frame; a batch takes twice the time. A GPU needs large batches.
    parts = zip(frames.split(size := 1 if device.type == "cpu" else len(frames)), draws.split(size, 1), strict=True)
    return (
        torch.cat([_augment_frames(part, part_draws) for part, part_draws in parts]).reshape(images.shape).cpu().numpy()
    )


def _augment_frames(frames: Tensor, draws: Tensor) -> Tensor:
    """Return augmented frames [N, H, W, 3] uint8 for the random numbers `draws` [6, N]."""
    shifted = shift(frames, draws[0], draws[1])
    colored = jitter(shifted.permute(0, 3, 1, 2).contiguous().float() / 255.0, draws[2:])
    return (colored * 255.0).round_().to(torch.uint8).permute(0, 2, 3, 1)


def shift(frames: Tensor, down: Tensor, right: Tensor, pixels: int | None = None) -> Tensor:
    """Shift frames [N, H, W, 3] by whole pixels, at most `pixels` in each direction; edge pixels are repeated.

    `down` and `right` [N] are uniform random numbers in [0, 1). `pixels` defaults to the margin of the crop.
    """
    count, height, width, _ = frames.shape
    margin = (1.0 - math.sqrt(CROP_AREA)) / 2.0

    def get_source_positions(size: int, uniform: Tensor) -> Tensor:
        reach = int(margin * size) if pixels is None else pixels
        offset = (uniform * (2 * reach + 1)).floor().long() - reach
        return (torch.arange(size, device=frames.device) + offset[:, None]).clamp_(0, size - 1)

    rows, columns = get_source_positions(height, down), get_source_positions(width, right)
    if frames.device.type == "cpu":
        # Copy whole rows first: this takes a fifth of the time of the gather below, which copies single pixels.
        triples = zip(frames, rows, columns, strict=True)
        return torch.stack([frame.index_select(0, row).index_select(1, column) for frame, row, column in triples])
    frame_numbers = torch.arange(count, device=frames.device)[:, None, None]
    return frames[frame_numbers, rows[:, :, None], columns[:, None, :]]


def jitter(pixels: Tensor, draws: Tensor) -> Tensor:
    """Adjust brightness, contrast, saturation and hue of images [N, 3, H, W] in 0..1.

    `draws` [4, N] are uniform random numbers in [0, 1), one row per property.
    """
    brightness, contrast, saturation, hue = (row[:, None, None, None] for row in draws)
    pixels = pixels + (2.0 * brightness - 1.0) * BRIGHTNESS
    mean = pixels.mean(dim=(2, 3), keepdim=True)
    pixels = ((pixels - mean) * _scale_to_range(contrast, CONTRAST) + mean).clamp_(0.0, 1.0)
    return adjust_hue_and_saturation(pixels, _scale_to_range(saturation, SATURATION), (2.0 * hue - 1.0) * HUE)


def adjust_hue_and_saturation(pixels: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Scale the saturation and rotate the hue of images [N, 3, H, W] in 0..1.

    `saturation` (a factor) and `hue` (a fraction of a turn, at most a third) broadcast over pixels.

    HSV to RGB in closed form: channel n of (5, 3, 1) is v - v*s*max(0, min(k, 4-k, 1)), k = (n + 6 h) mod 6. On a CPU,
    `where`, `remainder` and a maximum with index are simpler but ten times slower than sums and products.
    """
    value = pixels.amax(dim=1, keepdim=True)
    color_range = value - pixels.amin(dim=1, keepdim=True)
    red, green, blue = pixels.split(1, dim=1)
    safe = color_range.clamp(min=1e-12)
    is_red = value == red
    is_green = (value == green) & ~is_red
    # Hues are numbered 0 (red), 1 (yellow), 2 (green) to 6. Exactly one of the three terms is not multiplied by 0.
    sixth = (green - blue) / safe * is_red
    sixth += ((blue - red) / safe + 2.0) * is_green
    sixth += ((red - green) / safe + 4.0) * ~(is_red | is_green)
    chroma = torch.minimum(color_range * saturation, value)
    # min(k, 4-k) is 2-|k-2|. In the range -2..12 of k, the distance to the nearer of its peaks at 2 and 8 replaces the
    # remainder: |k-2| becomes ||k-5|-3|.
    offsets = torch.tensor([0.0, -2.0, -4.0], device=pixels.device)[:, None, None]
    distance = (sixth + 6.0 * hue + offsets).abs_().sub_(3.0).abs_()
    return value - chroma * (2.0 - distance).clamp_(0.0, 1.0)


def _scale_to_range(uniform: Tensor, bounds: tuple[float, float]) -> Tensor:
    return bounds[0] + uniform * (bounds[1] - bounds[0])
