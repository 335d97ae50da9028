"""Transitions of action chunks in a data set; a chunk starts at every frame."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodyrl.data.reader import Demonstrations, join_demonstrations
from embodyrl.data.rl_demonstrations import ends_with_success, sum_rewards
from embodyrl.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTransitions:
    """M transitions, each of one action chunk; observations are frame indices of a data set."""

    start: IntArray
    """[M] index of the frame with the observation."""
    after: IntArray
    """[M] index of the frame with the next observation; ignored for terminal transitions."""
    reward: FloatArray
    """[M] sum of the rewards of the chunk."""
    discount: FloatArray
    """[M] gamma, or 0 if the chunk ends in a terminal state."""


def find_terminal_episodes(demos: Demonstrations) -> BoolArray:
    """Return a mask [E] of the episodes of one data set that end in a terminal state.

    An episode is terminal if its last action is its first success, or if it is shorter than the longest episode,
    because all episodes that a time limit truncates have the same length.
    """
    length = demos.stop - demos.start
    return ends_with_success(demos) | (length < length.max(initial=0))


def build_transitions(
    parts: Sequence[Demonstrations], length: int, gamma: float, reward_scale: float
) -> tuple[Demonstrations, DataTransitions]:
    """Return the concatenated data sets, and the transitions of all chunks of `length` actions.

    A chunk without a next observation is omitted, unless the episode ends in a terminal state.
    """
    demos = join_demonstrations(list(parts))
    is_terminal = np.concatenate([find_terminal_episodes(part) for part in parts])
    columns = []
    for start, stop, terminal in zip(demos.start.tolist(), demos.stop.tolist(), is_terminal.tolist(), strict=True):
        frames = np.arange(start, stop if terminal else max(start, stop - length))
        end = np.minimum(frames + length, stop)
        columns.append((frames, end, np.minimum(end, stop - 1), np.where(end < stop, gamma, 0.0)))
    start, end, after, discount = (np.concatenate(column) for column in zip(*columns, strict=True))
    reward = reward_scale * sum_rewards(demos, start, end)
    return demos, DataTransitions(
        start=start, after=after, reward=reward.astype(np.float32), discount=discount.astype(np.float32)
    )
