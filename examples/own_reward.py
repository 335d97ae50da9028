"""A reward of your own. See docs/tutorials/own_reward.md."""


def vowels(prompt: str, response: str, reference: str) -> float:
    """Share of vowels in a reply."""
    said = response.strip()
    return sum(letter in "aeiou" for letter in said) / max(len(said), 1)
