"""Partial rewards for tasks with several goals."""

from embodyrl.envs.reward import RewardStep


def goals(step: RewardStep) -> float:
    """Return the fraction of the task's goals that are reached at the end of the episode, and 0 before."""
    return step.info["goals"] if step.terminated or step.truncated else 0.0
