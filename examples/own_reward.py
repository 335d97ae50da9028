"""A reward of your own: a reply should be made of vowels. See docs/tutorials/own_reward.md."""


def vowels(prompt: str, response: str, reference: str) -> float:
    said = response.strip()
    return sum(letter in "aeiou" for letter in said) / max(len(said), 1)
