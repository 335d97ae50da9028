"""Residual networks (arXiv 1512.03385) with torchvision's weight names, up to the last feature map."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodyrl.policies.lerobot.resnet_sizes import BASIC_BLOCK_RESNETS, DEPTHS, EXPANSION, WIDTHS

NORM_EPS = 1e-5
START_SCALE = 0.3
"""Initial scale of the last frozen norm in each residual block, which limits the outputs of untrained networks."""

Norm = Callable[[int], nn.Module]


class FrozenBatchNorm(nn.Module):
    """Batch norm with fixed statistics and scales, which are buffers."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Apply scale and shift to feature maps [N, C, H, W]."""
        scale = self.weight * (self.running_var + NORM_EPS).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def build_group_norm(channels: int) -> nn.Module:
    """Return a group norm with groups of 16 channels."""
    return nn.GroupNorm(channels // 16, channels)


def _build_conv(inputs: int, outputs: int, size: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2 * dilation, dilation, bias=False)


class BasicBlock(nn.Module):
    """Basic residual block: two 3x3 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _build_conv(inputs, width, 3, stride), norm(width)
        self.conv2, self.bn2 = _build_conv(width, width, 3), norm(width)
        self.downsample = _build_shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the next feature map."""
        skip = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + skip)


class Bottleneck(nn.Module):
    """Bottleneck residual block: 1x1, 3x3 (strided) and 1x1 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm, dilation: int = 1) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1, self.bn1 = _build_conv(inputs, width, 1), norm(width)
        self.conv2, self.bn2 = _build_conv(width, width, 3, stride, dilation), norm(width)
        self.conv3, self.bn3 = _build_conv(width, outputs, 1), norm(outputs)
        self.downsample = _build_shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the next feature map."""
        skip = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + skip)


def _build_shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_build_conv(inputs, outputs, 1, stride), norm(outputs))


def build_resnet_parts(name: str, norm: Norm, *, dilated: bool = False) -> OrderedDict[str, nn.Module]:
    """Build the modules of a ResNet; return them in order, by torchvision's names.

    Args:
        name: a key of `DEPTHS`.
        norm: function that returns the norm for a number of channels.
        dilated: keep the input size in the last layer and dilate its convolutions; bottlenecks only.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, 3, bias=False), bn1=norm(64), relu=nn.ReLU(), maxpool=nn.MaxPool2d(3, 2, 1)
    )
    inputs = 64
    for index, (blocks, width) in enumerate(zip(DEPTHS[name], WIDTHS, strict=True)):
        layer: list[nn.Module] = []
        for block in range(blocks):
            dilates = dilated and index == 3
            stride = 2 if block == 0 and index and not dilates else 1
            if name in BASIC_BLOCK_RESNETS:
                layer.append(BasicBlock(inputs, width, stride, norm))
                inputs = width
            else:
                layer.append(Bottleneck(inputs, width, stride, norm, 2 if dilates and block else 1))
                inputs = EXPANSION * width
        parts[f"layer{index + 1}"] = nn.Sequential(*layer)
    for module in chain.from_iterable(part.modules() for part in parts.values()):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for last in ("bn3", "bn2"):
            if isinstance(norm_layer := getattr(module, last, None), FrozenBatchNorm):
                norm_layer.weight.fill_(START_SCALE)
                break
    return parts
