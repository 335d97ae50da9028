"""What -1 and 1 stand for in actions and states of a small flow policy. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodyrl.errors import CheckpointError
from embodyrl.types import EnvSpec, FloatArray, GripperConvention

STATISTICS_FILE = "dataset_statistics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Bounds of actions and states; equal ones say that a number is constant in the data."""

    action_low: FloatArray
    """[A]"""
    action_high: FloatArray
    """[A]"""
    state_low: FloatArray
    """[S]"""
    state_high: FloatArray


def units_of(env: EnvSpec, gripper: GripperConvention | None, folder: Path | None) -> Units:
    """The bounds q01 and q99 of the folder's only statistics; without them those of the action space, or -1 and 1.

    Args:
        env: says how many numbers there are.
        gripper: of the policy; its ends are the bounds of that number.
        folder: may hold statistics.

    Raises:
        CheckpointError: the statistics are malformed, or of another number of dimensions.
    """
    space = env.action_space
    low, high = (np.array(b, np.float32) for b in ((space.low, space.high) if space else ([], [])))
    low, high = (low, high) if len(low) else (-np.ones(env.action_dim, np.float32), np.ones(env.action_dim, np.float32))
    free = ~np.isfinite(high - low)
    low, high = np.where(free, -1.0, low), np.where(free, 1.0, high)
    state = -np.ones(env.state_dim, np.float32), np.ones(env.state_dim, np.float32)
    if folder is not None and (folder / STATISTICS_FILE).exists():
        low, high = _bounds(folder, "action", env.action_dim)
        state = _bounds(folder, "proprio", env.state_dim) if env.state_dim else state
    if gripper is not None:
        ends = sorted((gripper.open, gripper.closed))
        low[gripper.index], high[gripper.index] = ends
    return Units(action_low=low, action_high=high, state_low=state[0], state_high=state[1])


def _bounds(folder: Path, part: str, size: int) -> tuple[FloatArray, FloatArray]:
    path = folder / STATISTICS_FILE
    try:
        (entry,) = json.loads(path.read_text(encoding="utf-8")).values()
        low, high = (np.array(entry[part][name], np.float32) for name in ("q01", "q99"))
        if low.shape != (size,) or high.shape != (size,):
            raise ValueError(f"{len(low)} numbers, the environment has {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {part} is malformed ({error!r}); `embodyrl sft` writes it.") from error
    return low, high
