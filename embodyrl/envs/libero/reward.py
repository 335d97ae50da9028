"""Partial rewards for tasks with several goals."""

from embodyrl.envs.reward import RewardStep


def new_goals(step: RewardStep) -> float:
    """Return the fraction of the task's goals that this step reaches for the first time in the episode."""
    return step.info["new_goals"]
