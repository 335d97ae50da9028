"""Image encoder and U-Net of a diffusion policy (arXiv 2303.04137), with LeRobot's weight names."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.lerobot.diffusion.config import FINAL_GROUPS, DiffusionConfig
from embodyrl.policies.lerobot.normalization import Inputs
from embodyrl.policies.lerobot.resnet import build_group_norm, build_resnet_parts
from embodyrl.policies.lerobot.resnet_sizes import compute_map_size, count_last_channels


class SpatialSoftmax(nn.Module):
    """Spatial softmax: expected coordinates of learned key points (arXiv 1504.00702)."""

    pos_grid: Tensor

    def __init__(self, channels: int, size: tuple[int, int], points: int) -> None:
        super().__init__()
        height, width = size
        self.nets = nn.Conv2d(channels, points, 1)
        row, column = (torch.linspace(-1, 1, count, dtype=torch.float64) for count in (height, width))
        grid = torch.stack([column.expand(height, -1), row[:, None].expand(-1, width)], 2)
        self.register_buffer("pos_grid", grid.flatten(0, 1).float())

    def forward(self, features: Tensor) -> Tensor:
        """Map feature maps [N, C, H, W] to coordinates [N, points, 2] in -1..1, column first."""
        return self.nets(features).flatten(2).softmax(2) @ self.pos_grid


class ImageEncoder(nn.Module):
    """Image encoder: resizing, cropping, backbone, key points and a linear layer."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self._resize_shape, self._crop, self._random = config.resize_shape, config.crop_size, config.crop_is_random
        norm = build_group_norm if config.use_group_norm else nn.BatchNorm2d
        self.backbone = nn.Sequential(*build_resnet_parts(config.vision_backbone, norm).values())
        points, channels = config.spatial_softmax_num_keypoints, count_last_channels(config.vision_backbone)
        self.pool = SpatialSoftmax(channels, compute_map_size(config.input_size), points)
        self.out = nn.Linear(2 * points, 2 * points)

    def forward(self, images: Tensor) -> Tensor:
        """Map normalized images [N, 3, H, W] to features [N, 2 points]."""
        if self._resize_shape is not None:
            images = F.interpolate(images, self._resize_shape, mode="bilinear", antialias=True)
        if self._crop is not None:
            images = self._crop_images(images, *self._crop)
        return F.relu(self.out(self.pool(self.backbone(images)).flatten(1)))

    def _crop_images(self, images: Tensor, height: int, width: int) -> Tensor:
        """Crop images at the center; during training, at one random position for all images of a batch."""
        margins = images.shape[2] - height, images.shape[3] - width
        top, left = (round(margin / 2) for margin in margins)
        if self.training and self._random and any(margins):
            top, left = (int(torch.randint(0, margin + 1, (1,))) for margin in margins)
        return images[:, :, top : top + height, left : left + width]


class StepEmbedding(nn.Module):
    """Sine and cosine embedding of diffusion timesteps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._half = width // 2

    def forward(self, timestep: Tensor) -> Tensor:
        """Map diffusion timesteps [B] to embeddings [B, width]."""
        rate = torch.exp(torch.arange(self._half, device=timestep.device) * -(math.log(10_000) / (self._half - 1)))
        angle = timestep[:, None] * rate
        return torch.cat([angle.sin(), angle.cos()], 1)


class ConvBlock(nn.Module):
    """Convolution over the time steps of a chunk, group norm and Mish."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int) -> None:
        super().__init__()
        conv = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)
        self.block = nn.Sequential(conv, nn.GroupNorm(groups, outputs), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        """Map features [B, C, H] of H time steps to [B, outputs, H]."""
        return self.block(x)


class ResidualBlock(nn.Module):
    """Residual block: two convolution blocks, and between them FiLM conditioning (arXiv 1709.07871)."""

    def __init__(self, inputs: int, outputs: int, condition: int, config: DiffusionConfig) -> None:
        super().__init__()
        self._scales = config.use_film_scale_modulation
        self.conv1 = ConvBlock(inputs, outputs, config.kernel_size, config.n_groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, outputs * (1 + self._scales)))
        self.conv2 = ConvBlock(outputs, outputs, config.kernel_size, config.n_groups)
        self.residual_conv = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map [B, C, H] and conditions [B, D] to [B, outputs, H]."""
        out, film = self.conv1(x), self.cond_encoder(condition)[..., None]
        if self._scales:
            scale, shift = film.chunk(2, 1)
            out = scale * out + shift
        else:
            out = out + film
        return self.conv2(out) + self.residual_conv(x)


class UNetStage(nn.Sequential):
    """Two residual blocks, and a layer that changes the number of time steps."""

    def forward(self, input: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Map [B, C, H] to two outputs: the skip connection [B, C', H], and the output of the last layer."""
        first, second, resize = self
        skip = second(first(input, condition), condition)
        return skip, resize(skip)


class UNet(nn.Module):
    """Denoising network over the time steps of a chunk."""

    def __init__(self, config: DiffusionConfig, condition: int) -> None:
        super().__init__()
        width, levels = config.diffusion_step_embed_dim, config.down_dims
        self.diffusion_step_encoder = nn.Sequential(
            StepEmbedding(width), nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width)
        )

        def blocks(inputs: int, outputs: int) -> list[nn.Module]:
            sizes = ((inputs, outputs), (outputs, outputs))
            return [ResidualBlock(a, b, width + condition, config) for a, b in sizes]

        self.down_modules = nn.ModuleList()
        for index, (a, b) in enumerate(pairwise((config.action_dim, *levels))):
            down = nn.Conv1d(b, b, 3, 2, 1) if index < len(levels) - 1 else nn.Identity()
            self.down_modules.append(UNetStage(*blocks(a, b), down))
        self.mid_modules = nn.ModuleList(blocks(levels[-1], levels[-1]))
        self.up_modules = nn.ModuleList(
            UNetStage(*blocks(2 * a, b), nn.ConvTranspose1d(b, b, 4, 2, 1)) for a, b in pairwise(levels[::-1])
        )
        first = ConvBlock(levels[0], levels[0], config.kernel_size, FINAL_GROUPS)
        self.final_conv = nn.Sequential(first, nn.Conv1d(levels[0], config.action_dim, 1))

    def forward(self, x: Tensor, timestep: Tensor, condition: Tensor) -> Tensor:
        """Return predictions [B, H, A] for noisy chunks [B, H, A] at timesteps [B] with conditions [B, D]."""
        x, condition_embedding = x.transpose(1, 2), torch.cat([self.diffusion_step_encoder(timestep), condition], 1)
        skips = []
        for stage in self.down_modules:
            skip, x = stage(x, condition_embedding)
            skips.append(skip)
        for block in self.mid_modules:
            x = block(x, condition_embedding)
        for stage in self.up_modules:
            _, x = stage(torch.cat([x, skips.pop()], 1), condition_embedding)
        return self.final_conv(x).transpose(1, 2)


class Diffusion(nn.Module):
    """Network of a diffusion policy: image encoders and U-Net."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        if config.cameras and config.use_separate_rgb_encoder_per_camera:
            self.rgb_encoder: nn.Module = nn.ModuleList(ImageEncoder(config) for _ in config.cameras)
        elif config.cameras:
            self.rgb_encoder = ImageEncoder(config)
        self.unet = UNet(config, config.condition_width)

    def condition(self, inputs: Inputs) -> Tensor:
        """Return conditions [B, D]: the state, image features of all cameras and environment state of each step."""
        assert inputs.state is not None
        parts = [inputs.state]
        if inputs.images is not None:
            parts.append(self._encode_images(inputs.images))
        if inputs.environment is not None:
            parts.append(inputs.environment)
        return torch.cat(parts, 2).flatten(1)

    def _encode_images(self, images: Tensor) -> Tensor:
        """Return features [B, steps, cameras x points x 2] of images [B, steps, cameras, 3, H, W]."""
        batch, steps = images.shape[:2]
        if isinstance(self.rgb_encoder, nn.ModuleList):
            pairs = zip(self.rgb_encoder, images.flatten(0, 1).unbind(1), strict=True)
            return torch.cat([encoder(views) for encoder, views in pairs], 1).unflatten(0, (batch, steps))
        return self.rgb_encoder(images.flatten(0, 2)).unflatten(0, (batch, steps, -1)).flatten(2)
