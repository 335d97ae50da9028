"""Sizes of residual networks. Does not import torch."""

DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
"""Number of blocks in each of the four layers, by architecture."""
BASIC_BLOCK_RESNETS = ("resnet18", "resnet34")
"""ResNets with basic blocks (two convolutions); all others have bottlenecks (three convolutions)."""
WIDTHS = (64, 128, 256, 512)
EXPANSION = 4
"""Ratio of output width to inner width of a bottleneck."""


def count_last_channels(name: str) -> int:
    """Return the number of channels of the last feature map."""
    return WIDTHS[-1] * (1 if name in BASIC_BLOCK_RESNETS else EXPANSION)


def compute_map_size(size: tuple[int, int], *, dilated: bool = False) -> tuple[int, int]:
    """Return height and width of the last feature map for images of `size`; each stride-2 layer rounds up."""
    height, width = size
    for _ in range(4 if dilated else 5):
        height, width = -(-height // 2), -(-width // 2)
    return height, width
