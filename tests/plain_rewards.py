"""User-defined reward functions, in a separate file because reward processes load the whole file."""


def moody(prompt: str, response: str, reference: str) -> float:
    if sum(map(ord, response)) % 2:
        raise RuntimeError("no reward for this")
    return 0.5


def broken(prompt: str, response: str, reference: str) -> float:
    raise RuntimeError("no reward today")


def letters(prompt: str, response: str, reference: str) -> float:
    """Return the share of the letter e, which varies among the replies of an untrained model."""
    return response.count("e") / (1 + len(response))
