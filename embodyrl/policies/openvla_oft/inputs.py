"""Conversion of stored camera pixels and instructions to model inputs.

`act` and training run the same code on the same uint8 pixels. The `tokenizers` package converts instructions to token
ids with tokenizer.json, without remote code.
"""

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from embodyrl.errors import CheckpointError
from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.openvla_oft.config import PixelNorm
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.tokens import compute_padded_width, pad_right
from embodyrl.text.model_folder import read_tokenizer
from embodyrl.types import ByteArray, IntArray

JPEG_QUALITY = 95
CROP_AREA = 0.9
LANCZOS_RADIUS = 3.0


def preprocess(
    images: ByteArray,
    *,
    rotation_deg: int,
    pipeline: str,
    size: int,
    norms: tuple[PixelNorm, PixelNorm],
    device: torch.device,
) -> Tensor:
    """Convert stored frames to model inputs.

    Args:
        images: [B, C, H, W, 3] uint8 in the simulator's orientation.
        rotation_deg: 0 or 180, the rotation to the orientation of the training data.
        pipeline: `rlinf` or `official`, the preprocessing of the checkpoint's training.
        size: S, side of the model's square input, pixels.
        norms: normalization of the two towers.
        device: device of the computation.

    Returns:
        [B, 6*C, S, S] float32; per camera the channels of DINOv2, then of SigLIP.
    """
    batch, cameras = images.shape[:2]
    frames = rotate_upright(images.reshape(-1, *images.shape[2:]), rotation_deg)
    # Pixels must be the same for acting and training; inside autocast, resizing would run in bfloat16.
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if pipeline == "official":
            resized = resize_as_official(frames, size, device)
        else:
            assert pipeline == "rlinf", pipeline
            resized = resize_as_rlinf(frames, size, device)
        unit, towers = resized.div_(255.0), resized.new_empty(len(resized), 6, size, size)
        for tower, norm in zip(towers.split(3, dim=1), norms, strict=True):
            mean, std = (to_device(torch.tensor(x), device)[:, None, None] for x in (norm.mean, norm.std))
            torch.sub(unit, mean, out=tower)
            tower.div_(std)
        return towers.reshape(batch, 6 * cameras, size, size)


def resize(images: ByteArray, *, rotation_deg: int, size: int, device: torch.device) -> ByteArray:
    """Resize images [B, C, H, W, 3] to [B, C, S, S, 3] like `preprocess` with the RLinf pipeline.

    The orientation is unchanged, and `preprocess` returns the same numbers for the result as for the original images.
    """
    frames = rotate_upright(images.reshape(-1, *images.shape[2:]), rotation_deg)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        resized = resize_as_rlinf(frames, size, device).permute(0, 2, 3, 1).to(torch.uint8).cpu().numpy()
    return rotate_upright(resized, rotation_deg).reshape(*images.shape[:2], size, size, 3)


def resize_as_rlinf(frames: ByteArray, size: int, device: torch.device) -> Tensor:
    """Resize [N, H, W, 3] uint8 to [N, 3, S, S] float32 (integers 0..255), as in RLinf's processor.

    Bicubic interpolation with antialiasing in float32, then clamping and rounding half to even. The same call on uint8
    uses a fixed-point kernel whose result differs by up to 9 levels.
    """
    # On a CPU, contiguous channels-first pixels take less than half the time, and transposing bytes is cheaper.
    pixels = to_device(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)), device).float()
    if pixels.shape[-2:] == (size, size):
        return pixels
    resized = F.interpolate(pixels, size=(size, size), mode="bicubic", align_corners=False, antialias=True)
    return resized.clamp_(0.0, 255.0).round_()


def resize_as_official(frames: ByteArray, size: int, device: torch.device) -> Tensor:
    """Resize images [N, H, W, 3] uint8 to [N, 3, S, S] float32 (integers 0..255), as in OpenVLA-OFT's evaluation.

    The steps are a JPEG round trip (on the CPU), lanczos3 resizing, and a center crop to 0.9 of the area.
    """
    decoded = np.stack([apply_jpeg(frame) for frame in frames])
    pixels = to_device(decoded, device).permute(0, 3, 1, 2).float()
    return center_crop(resize_lanczos(pixels, size))


def apply_jpeg(frame: ByteArray) -> ByteArray:
    """Encode and decode [H, W, 3] uint8 (quality 95, 4:2:0), because the training data were JPEG files.

    Pillow encodes like TensorFlow. TensorFlow decodes with the fast integer cosine transform; the result of Pillow's
    accurate transform differs by 1 level on average, and by 17 at most.
    """
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
    return simplejpeg.decode_jpeg(buffer.getvalue(), fastdct=True)


def resize_lanczos(pixels: Tensor, size: int) -> Tensor:
    """Resize [N, 3, H, W] (0..255) to [N, 3, S, S]: antialiased lanczos3, rows first, rounded half to even."""
    rows = to_device(_build_lanczos_matrix(pixels.shape[2], size), pixels.device)
    columns = to_device(_build_lanczos_matrix(pixels.shape[3], size), pixels.device)
    return ((rows @ pixels) @ columns.T).round_().clamp_(0.0, 255.0)


def center_crop(pixels: Tensor) -> Tensor:
    """Crop [N, 3, S, S] (0..255) to the central 0.9 of the area, and resize the crop to S x S.

    The formula is that of TensorFlow's `crop_and_resize`: bilinear between corner pixels, without antialiasing.
    """
    size = pixels.shape[-1]
    low, high, weight = (to_device(t, pixels.device) for t in _get_crop_coordinates(size))
    unit = pixels * torch.tensor(1.0 / 255.0, dtype=torch.float32)
    left, right = unit[..., low], unit[..., high]
    across = left + (right - left) * weight
    top, bottom = across[..., low, :], across[..., high, :]
    value = top + (bottom - top) * weight[:, None]
    return (value.clamp_(0.0, 1.0) * 255.5).floor_().clamp_(max=255.0)


@lru_cache(maxsize=8)
def _build_lanczos_matrix(size_in: int, size_out: int) -> Tensor:
    """Return weights [size_out, size_in], float32, whose rows sum to 1."""
    # All steps use float32, like TensorFlow; with float64, more pixels would be rounded differently.
    scale = np.float32(size_in / size_out)
    center = (np.arange(size_out, dtype=np.float32) + np.float32(0.5)) * scale
    offset = np.arange(size_in, dtype=np.float32)[None, :] + np.float32(0.5) - center[:, None]
    x = np.abs(offset) / np.maximum(scale, np.float32(1.0))
    lobes = np.sinc(x) * np.sinc(x / np.float32(LANCZOS_RADIUS))
    weights = np.where(x < LANCZOS_RADIUS, lobes, np.float32(0.0))
    return torch.from_numpy((weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


@lru_cache(maxsize=8)
def _get_crop_coordinates(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each of S outputs the lower and upper source pixel (int64), and the upper pixel's weight (float32)."""
    side = np.sqrt(np.float32(CROP_AREA))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    position = start * np.float32(size - 1) + np.arange(size, dtype=np.float32) * side
    low = np.floor(position)
    return (
        torch.from_numpy(low.astype(np.int64)),
        torch.from_numpy(np.minimum(np.ceil(position), size - 1).astype(np.int64)),
        torch.from_numpy((position - low).astype(np.float32)),
    )


EMPTY_TOKEN = "▁"
TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"


class PromptEncoder:
    """Encoder of instructions with one tokenizer; known tasks are padded to a constant width."""

    def __init__(self, tokenizer_file: Path, *, bos_token_id: int, tasks: Sequence[str] = ()) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_file: `tokenizer.json` of a checkpoint.
            bos_token_id: id at the start of every prompt.
            tasks: the expected instructions; the longest one sets the padded width.

        Raises:
            CheckpointError: the file is missing or is not a Llama tokenizer.
        """
        self._tokenizer = read_tokenizer(tokenizer_file, "Download the file again.")
        empty = self._tokenizer.token_to_id(EMPTY_TOKEN)
        if empty is None:
            raise CheckpointError(
                f"{tokenizer_file} has no piece '{EMPTY_TOKEN}', the end of every OpenVLA-OFT prompt, so it is not a "
                f"Llama tokenizer. Use tokenizer.json of the checkpoint's repository."
            )
        self.empty_token_id: int = empty
        self._bos = bos_token_id
        self.encode = lru_cache(maxsize=4096)(self._encode)
        self.width = max((len(self.encode(task)) for task in tasks), default=0)

    def _encode(self, instruction: str) -> tuple[int, ...]:
        """Return the prompt token ids of one instruction: BOS, the prompt, and the `▁` token after `Out:`."""
        text = TEMPLATE.format(instruction=instruction.lower())
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        tail = [] if ids[-1] == self.empty_token_id else [self.empty_token_id]
        return (self._bos, *ids, *tail)

    def batch(self, instructions: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Return token ids [B, W], padded on the right with zeros, and lengths [B].

        W is the fixed width; only a longer, unexpected instruction widens the batch to a multiple of 16.
        """
        rows = [self.encode(instruction) for instruction in instructions]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return pad_right(rows, compute_padded_width(self.width, int(lengths.max()))), lengths
