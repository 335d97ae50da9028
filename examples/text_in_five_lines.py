"""Reinforcement learning of a language model in five lines; "tiny" starts from nothing, a folder is your own model."""

import sys

import embodyrl


def vowels(prompt: str, response: str, reference: str) -> float:
    """Share of vowels in a reply."""
    return sum(letter in "aeiou" for letter in response) / max(len(response), 1)


if __name__ == "__main__":
    rows = [{"prompt": word} for word in ("stone", "river", "cloud", "ember", "field", "glass", "north", "plain")]
    result = embodyrl.GRPO("tiny", vowels, rows, "runner.max_steps=30").train()
    sys.stdout.write(f"{result}\n")
