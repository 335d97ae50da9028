"""Rewards of your own. See docs/tutorials/own_reward.md."""

from embodyrl.envs.reward import RewardStep


def vowels(prompt: str, response: str, reference: str) -> float:
    """Share of vowels in a reply."""
    said = response.strip()
    return sum(letter in "aeiou" for letter in said) / max(len(said), 1)


def careful(step: RewardStep) -> float:
    """Success, less what the movement costs."""
    return step.success - 0.01 * float((step.action**2).sum())
