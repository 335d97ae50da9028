"""Config and normalization bounds in the folder of a small flow policy. Does not import torch."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.vla.folder import CONFIG_FILE, RANDOM_INIT_KEY, STATISTICS_FILE, read_sft_statistics
from embodyrl.types import EnvSpec, FloatArray, GripperConvention


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallConfig:
    """Sizes of `SmallFlow`."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    planes: tuple[int, ...] = (32, 64)
    """Number of channels of each convolution; each convolution halves the image."""
    maps: int = 32
    """Number of feature maps for spatial softmax."""
    vocabulary: int = 512
    """Number of word embeddings; words are hashed to their indices."""
    num_images: int = 0
    state_dim: int = 0
    action_width: int = 0
    """A: dimension of an action."""

    @classmethod
    def read(cls, folder: Path | None) -> Self:
        """Return the config of a folder; without a folder, return the defaults.

        Raises:
            CheckpointError: the file is missing or malformed.
        """
        if folder is None:
            return cls()
        path = folder / CONFIG_FILE
        with reject_malformed(path, "Use the folder of a small flow policy."):
            saved: dict[str, Any] = dict(read_json(path))
            saved.pop(RANDOM_INIT_KEY, None)
            if unknown := saved.keys() - {f.name for f in fields(cls)}:
                raise ValueError(f"the file contains unknown keys: {', '.join(sorted(unknown))}")
        saved["planes"] = tuple(saved.get("planes", cls().planes))
        return cls(**saved)

    def save(self, folder: Path) -> None:
        """Write `config.json`."""
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizationBounds:
    """Bounds of actions and states by dimension. Equal bounds mark a dimension that is constant in the data."""

    action_low: FloatArray
    """Lower action bounds [A]."""
    action_high: FloatArray
    """Upper action bounds [A]."""
    state_low: FloatArray
    """Lower state bounds [S]."""
    state_high: FloatArray


def read_bounds(env: EnvSpec, gripper: GripperConvention | None, folder: Path | None) -> NormalizationBounds:
    """Return the bounds of actions and states that normalization maps to -1 and 1.

    The bounds are q01 and q99 of the folder's statistics, else the bounds of the action space, else -1 and 1.

    Args:
        env: environment spec, with the dimensions of actions and states.
        gripper: gripper convention of the policy; its two values are the bounds of the gripper dimension.
        folder: folder that may contain statistics.

    Raises:
        CheckpointError: the statistics are malformed, or have another number of dimensions.
    """
    low, high = (np.array(limit, np.float32) for limit in env.action.bounds)
    unbounded = ~np.isfinite(high - low)
    low, high = np.where(unbounded, -1.0, low), np.where(unbounded, 1.0, high)
    state = -np.ones(env.state_dim, np.float32), np.ones(env.state_dim, np.float32)
    if folder is not None and (folder / STATISTICS_FILE).exists():
        low, high = _read_part_bounds(folder, "action", env.action.dim)
        state = _read_part_bounds(folder, "proprio", env.state_dim) if env.state_dim else state
    if gripper is not None:
        gripper_range = sorted((gripper.open, gripper.closed))
        low[gripper.index], high[gripper.index] = gripper_range
    return NormalizationBounds(action_low=low, action_high=high, state_low=state[0], state_high=state[1])


def _read_part_bounds(folder: Path, part: str, size: int) -> tuple[FloatArray, FloatArray]:
    statistics = read_sft_statistics(folder / STATISTICS_FILE).get(part, {})
    low, high = (np.array(statistics.get(name, ()), np.float32) for name in ("q01", "q99"))
    if low.shape != (size,):
        raise CheckpointError(
            f"{folder / STATISTICS_FILE}: the statistics of '{part}' have {len(low)} dimensions, but the environment "
            f"has {size}. Use the environment in which the checkpoint was trained."
        )
    return low, high
