"""Argument of reward functions: an executed env step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from embodyrl.types import FloatArray, ObservationOut


@dataclass(frozen=True, kw_only=True)
class RewardStep:
    """Executed env step; the argument of a reward function.

    >>> def careful(step: RewardStep) -> float:
    ...     return step.success - 0.01 * float(abs(step.action).sum())
    """

    env_index: int
    step: int
    """Index of the step in the episode, counted from 1."""
    reset_id: int
    """Id of the episode's initial state, counted over all tasks."""
    task_id: int
    instruction: str
    action: FloatArray
    """Executed action [A]."""
    reward: float
    """Reward of the simulator after the action, before `use_rel_reward` and `reward_coef` are applied."""
    success: bool
    """True if the goal is reached after the action."""
    terminated: bool
    truncated: bool
    look: Callable[[], ObservationOut] = field(repr=False)
    ask: Callable[[], Mapping[str, Any]] = field(repr=False)

    @cached_property
    def observation(self) -> ObservationOut:
        """Images [C, H, W, 3] uint8 and state [S] after the action; rendered at the first access."""
        return self.look()

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """Simulator's info of the step, by name; may be empty."""
        return self.ask()
