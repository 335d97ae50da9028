"""Partial rewards for tasks with several goals."""

from embodyrl.envs.reward import RewardStep


def goals(step: RewardStep) -> float:
    """Return the fraction of the task's goals that are reached at the end of the episode, and 0 before."""
    return step.info["goals"] if step.terminated or step.truncated else 0.0


def new_goals(step: RewardStep) -> float:
    """Return the fraction of the task's goals that this step reaches for the first time in the episode."""
    return step.info["new_goals"]
