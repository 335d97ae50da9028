"""From stored camera pixels to what a flow policy's vision tower reads: resized with padding, in -1..1."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from embodyrl.policies.transfer import on_device
from embodyrl.types import ByteArray

BLACK = -1.0


def fitted_size(frames: ByteArray, side: int) -> tuple[int, int]:
    """Height and width with the ratio of frames [N, H, W, 3] that fill a square of `side` pixels."""
    _, height, width, _ = frames.shape
    ratio = max(width / side, height / side)
    return int(height / ratio), int(width / ratio)


def pad_centred(frames: ByteArray, side: int) -> Tensor:
    """Resize frames [N, H, W, 3] uint8 to [N, 3, side, side] in -1..1, with black around them.

    As openpi's data transforms and client: Pillow's bilinear filter (which antialiases) on bytes.
    """
    height, width = fitted_size(frames, side)
    canvas = np.zeros((len(frames), side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    for target, frame in zip(canvas, frames, strict=True):
        image = Image.fromarray(frame)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        target[top : top + height, left : left + width] = np.asarray(image)
    return _centred(torch.from_numpy(canvas))


def pad_left_top(frames: ByteArray, side: int, device: torch.device | None = None) -> Tensor:
    """Resize frames [N, H, W, 3] uint8 to [N, 3, side, side] in -1..1, with black to the left and above.

    As lerobot's SmolVLA: plain bilinear interpolation in float32, without antialias.
    """
    pixels = _centred(on_device(np.array(frames), device or "cpu"))
    height, width = fitted_size(frames, side)
    # The same pixels for acting and training: inside autocast the resizing would run in bfloat16.
    with torch.autocast(pixels.device.type, enabled=False):
        pixels = F.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False)
    return F.pad(pixels, (side - width, 0, side - height, 0), value=BLACK)


def _centred(frames: Tensor) -> Tensor:
    """[N, H, W, 3] bytes to [N, 3, H, W] in -1..1."""
    return frames.permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0
