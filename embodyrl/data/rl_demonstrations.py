"""Demonstrations as training data of RL algorithms, alone or with rollouts (`algorithm.demonstrations`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embodyrl.channels.layout import OBSERVATION, encode_instruction
from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.reader import Demonstrations, join_demonstrations, load_demonstrations
from embodyrl.specs import PolicySpec, convert_gripper
from embodyrl.types import BoolArray, DoubleArray, IntArray


def load_rl_demonstrations(folders: Sequence[str], policy: PolicySpec, *, executed: bool = False) -> Demonstrations:
    """Load and join data sets of one environment; gripper actions are converted to the policy's convention.

    If `executed`, `action` contains the executed actions (for critics) instead of the labels.
    """
    roots = [resolve_asset(folder) for folder in folders]
    demos = join_demonstrations([load_demonstrations(folder) for folder in roots])
    actions = (demos.executed if executed else demos.action).copy()
    convert_gripper(actions, read_card(roots[0]).env.action.gripper, policy.gripper)
    return replace(demos, action=actions)


def build_observation_fields(demos: Demonstrations, steps: IntArray, width: int) -> dict[str, np.ndarray]:
    """Return the observations of `steps` as record fields; instructions are padded to `width` bytes."""
    instructions = np.stack([encode_instruction(str(text), width) for text in demos.instruction[steps]])
    arrays = (demos.images[steps], demos.state[steps], instructions)
    return {str(name): array for name, array in zip(OBSERVATION, arrays, strict=True)}


def ends_with_success(demos: Demonstrations) -> BoolArray:
    """Return a mask [E] of the episodes whose last action is their first success."""
    counts = np.concatenate([[0], demos.success.cumsum()])
    return (counts[demos.stop] - counts[demos.start] == 1) & demos.success[demos.stop - 1]


def sum_rewards(demos: Demonstrations, start: IntArray, stop: IntArray) -> DoubleArray:
    """Return the sum [n] of the rewards from step `start` to step `stop` (exclusive), [n] each."""
    cumulative = np.concatenate([[0.0], demos.reward.cumsum(dtype=np.float64)])
    return cumulative[stop] - cumulative[start]
