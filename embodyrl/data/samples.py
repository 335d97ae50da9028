"""Samples for SFT: observations with their target actions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record, encode_instruction, encode_reply
from embodyrl.data.reader import Demonstrations
from embodyrl.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Training or validation samples: M env steps of `demos` with their target actions."""

    demos: Demonstrations
    steps: IntArray
    """[M] indices of the env steps in `demos`."""
    actions: FloatArray
    """[M, K, A] action chunk that begins at each step, in the policy's gripper convention."""
    is_solved: BoolArray
    """[N] True for each step of `demos` in whose observation the goal is already reached."""
    valid: BoolArray
    """[M, K] False for padding, which repeats the first or last action of the episode."""
    history: int = 1
    """Number of observation steps per sample."""
    replies: Sequence[str] = ()
    """[M] replies of text tasks, instead of actions."""
    steps_per_sample: int = 1
    """Number of entries of `steps` per sample: 1, or 2 if a sample is a pair of chunks (better and worse episode)."""

    def __len__(self) -> int:
        return len(self.steps) // self.steps_per_sample

    def write(self, arena: Arena, record: int, row: int) -> None:
        """Write entry `row` of `steps` to an arena record."""
        demos, step = self.demos, self.steps[row]
        width = arena[Record.instruction].shape[1]
        observed = demos.window(self.steps[row : row + 1], self.history, before=self.history - 1)[0][0]
        arena[Record.images][record] = np.concatenate(demos.images[observed])
        arena[Record.observed_state][record] = demos.state[observed].ravel()
        arena[Record.instruction][record] = encode_instruction(str(demos.instruction[step]), width)
        arena[Record.action][record] = self.actions[row]
        arena[Record.valid][record] = self.valid[row]
        arena[Record.success][record] = self.is_solved[step]
        if self.replies:
            arena[Record.reply][record] = encode_reply(self.replies[row], arena[Record.reply].shape[1])
