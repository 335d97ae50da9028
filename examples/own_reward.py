"""Rewards of your own. See docs/tutorials/own_reward.md."""

import numpy as np

from embodyrl.envs.reward import RewardStep


def vowels(prompt: str, response: str, reference: str) -> float:
    """Return the fraction of vowels in a reply."""
    text = response.strip()
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def careful(step: RewardStep) -> float:
    """Return success (0 or 1) minus a penalty for large actions."""
    return step.success - 0.01 * float((step.action**2).sum())


def near(step: RewardStep) -> float:
    """Return minus the distance to the goal; the state of own_env:Reach is [x, y, goal x, goal y]."""
    x, y, goal_x, goal_y = step.observation.state
    return -float(np.hypot(goal_x - x, goal_y - y))
