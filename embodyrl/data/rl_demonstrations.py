"""Demonstrations as training data of RL algorithms, alone or with rollouts (`algorithm.demonstrations`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embodyrl.channels.layout import OBSERVATION, encode_instruction
from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.reader import Demonstrations, join_demonstrations, load_demonstrations
from embodyrl.policies.inputs import rotate_upright
from embodyrl.specs import EnvSpec, PolicySpec, convert_gripper
from embodyrl.types import BoolArray, DoubleArray, IntArray


def load_rl_demonstrations(folders: Sequence[str], policy: PolicySpec, env: EnvSpec) -> Demonstrations:
    """Load and join data sets of `env`.

    Frames are rotated to the orientation of `env`, and grippers converted to the convention of the policy.
    """
    parts: list[Demonstrations] = []
    for root in map(resolve_asset, folders):
        demos, recorded = load_demonstrations(root), read_card(root).env
        images = rotate_upright(demos.images, abs(recorded.cameras.rotation_deg - env.cameras.rotation_deg))
        action, executed = demos.action.copy(), demos.executed.copy()
        for actions in (action, executed):
            convert_gripper(actions, recorded.action.gripper, policy.gripper)
        parts.append(replace(demos, images=images, action=action, executed=executed))
    return join_demonstrations(parts)


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
