"""Sizes of the networks, which a checkpoint must match. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from embodyrl.errors import reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import check_equal
from embodyrl.types import ActionKind

CHANNELS = (32, 64, 64)
"""Output channels of the convolutions: kernel 3, stride 2, padding 1, for images of any size."""
IMAGE_FEATURES = 256

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetShape:
    """Network sizes and options, which determine the shapes and the meaning of the weights."""

    state_dim: int
    """S: dimension of the state."""
    num_images: int
    """C: number of images; 0: no convolutions."""
    image_size: tuple[int, int]
    """Height and width of the images in pixels, H and W."""
    action_kind: ActionKind
    sizes: tuple[int, ...]
    """Number of categories of each action dimension; empty for `box`."""
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    """Upper bound of each action dimension; None: unbounded. `low` and `high` are empty for discrete actions."""
    num_actions: int
    """K: number of actions per chunk."""
    hidden: tuple[int, ...]
    value_dim: int
    """V: number of value outputs."""
    activation: str = "tanh"
    """Activation of the hidden layers: tanh or relu."""
    normalized: bool = False
    """True if states are normalized with running statistics."""
    squashed: bool = False
    """True if actions are tanh of Gaussians whose standard deviation depends on the observation."""
    cameras: tuple[str, ...] = ()
    """Names of the C cameras, in the order of the images."""
    grey: bool = False
    """True if one channel of each image is used, because all three are equal."""

    @property
    def action_dim(self) -> int:
        """A, the action dimension."""
        return len(self.sizes or self.low)

    @property
    def outputs(self) -> int:
        """Number of policy outputs per action: logits, or means (and log standard deviations, if `squashed`)."""
        return sum(self.sizes) or self.action_dim * (2 if self.squashed else 1)

    @property
    def input_channels(self) -> int:
        """Number of input channels of the first convolution: the channels of all images of an observation."""
        return self.num_images * (1 if self.grey else 3)

    @property
    def conv_features(self) -> int:
        """Number of convolutional features: flattened outputs of the last convolution."""
        height, width = self.image_size
        for _ in CHANNELS:
            height, width = -(-height // 2), -(-width // 2)
        return CHANNELS[-1] * height * width

    @property
    def features(self) -> int:
        """Number of inputs of the policy and value networks: image features and state."""
        return (IMAGE_FEATURES if self.num_images else 0) + self.state_dim

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases."""
        count = _count_mlp_parameters((self.features, *self.hidden, self.num_actions * self.outputs))
        count += 0 if self.sizes or self.squashed else self.action_dim
        if self.value_dim:
            count += _count_mlp_parameters((self.features, *self.hidden, self.value_dim))
        if self.num_images:
            channels = (self.input_channels, *CHANNELS)
            count += sum(9 * a * b + b for a, b in pairwise(channels))
            count += _count_mlp_parameters((self.conv_features, IMAGE_FEATURES))
        return count

    def save(self, folder: Path) -> None:
        """Write `config.json`."""
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Check that the sizes match the `config.json` of a folder; a value head is optional.

        Raises:
            CheckpointError: the file is missing, malformed or of another kind of policy, or a size differs.
        """
        path = folder / CONFIG_FILE
        with reject_malformed(path, "Use a folder saved by a run with model=mlp or model=cnn."):
            saved: dict[str, Any] = dict(read_json(path))
            if "hidden" not in saved:
                raise ValueError("the network has no hidden layers")
        expected = json.loads(json.dumps(asdict(self))) | {"value_dim": saved.get("value_dim")}
        check_equal(saved, expected, path, "Use the environment and model settings of the training run.")


def _count_mlp_parameters(widths: tuple[int, ...]) -> int:
    return sum(a * b + b for a, b in pairwise(widths))
