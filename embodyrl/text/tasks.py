"""Synthetic text tasks; rows depend only on the arguments and the seed."""

import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np

from embodyrl.text.conversation import TextRow, build_row
from embodyrl.text.messages import Message

ROWS = 20_000
_SPARE = 1000
"""Number of additional samples, to replace repeated questions."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
RowSampler = Callable[[random.Random], tuple[str, str]]
"""Function that samples a (prompt, answer) pair."""
COLORS = {
    "black": (0, 0, 0),
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "magenta": (255, 0, 255),
    "cyan": (0, 255, 255),
    "white": (255, 255, 255),
}


def length(*, longest: int = 5, rows: int = ROWS, seed: int = 0) -> list[TextRow]:
    """Return rows such as `5=` with the answer xxxxx."""

    def sample_row(rng: random.Random) -> tuple[str, str]:
        number = rng.randint(1, longest)
        return f"{number}=", "x" * number

    return _build_rows(sample_row, rows, seed)


def copy(*, letters: str = "abc", size: int = 3, rows: int = ROWS, seed: int = 0) -> list[TextRow]:
    """Return rows such as `cab=` with the answer cab."""
    return _build_rows(_build_word_task(letters, size, lambda word: word), rows, seed)


def reverse(*, letters: str = "0123456789", size: int = 4, rows: int = ROWS, seed: int = 0) -> list[TextRow]:
    """Return rows such as `1234=` with the answer 4321."""
    return _build_rows(_build_word_task(letters, size, lambda word: word[::-1]), rows, seed)


def arithmetic(*, digits: int = 1, operations: str = "+-*", rows: int = ROWS, seed: int = 0) -> list[TextRow]:
    """Return rows such as `7*8=` with the answer 56."""

    def sample_row(rng: random.Random) -> tuple[str, str]:
        a, b, operation = rng.randrange(10**digits), rng.randrange(10**digits), rng.choice(operations)
        return f"{a}{operation}{b}=", str(OPERATIONS[operation](a, b))

    return _build_rows(sample_row, rows, seed)


def sums(*, largest: int = 20, seed: int = 0) -> list[TextRow]:
    """Return rows such as `What is 3 + 4?` with the answer 7; 3 + 4 and 4 + 3 are in one group."""
    return build_pair_rows(range(largest + 1), "+", seed)


def countdown(*, count: int = 3, largest: int = 20, rows: int = ROWS, seed: int = 0) -> list[TextRow]:
    """Return rows such as `3,7,2:23=`, whose answer is an expression that uses each number once and equals 23."""

    def sample_row(rng: random.Random) -> tuple[str, str]:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        value = numbers[0]
        for number in numbers[1:]:
            value = rng.choice((value + number, value - number, value * number))
        task = f"{','.join(map(str, rng.sample(numbers, count)))}:{value}"
        return f"{task}=", task

    return _build_rows(sample_row, rows, seed)


def colour(
    *, size: int = 16, noise: int = 40, shuffled: bool = False, rows: int = 2000, seed: int = 0
) -> list[TextRow]:
    """Return rows with an image of a colored square; the answer is the color.

    If `shuffled`, the color of the square is independent of the answer (control experiment).
    """

    def sample_row(rng: random.Random) -> TextRow:
        generator, side = np.random.default_rng(rng.getrandbits(32)), size // 2
        answer, x, y = rng.choice(list(COLORS)), rng.randrange(size - side + 1), rng.randrange(size - side + 1)
        shown_color = rng.choice(list(COLORS)) if shuffled else answer
        image = np.full((size, size, 3), 128)
        image[y : y + side, x : x + side] = COLORS[shown_color]
        image = (image + generator.integers(-noise, noise + 1, image.shape)).clip(0, 255).astype(np.uint8)
        return replace(build_row("?", answer), pictures=(image,))

    return [sample_row(random.Random(f"{seed}/{row}")) for row in range(rows)]


def _build_word_task(letters: str, size: int, answer: Callable[[str], str]) -> RowSampler:
    def sample_row(rng: random.Random) -> tuple[str, str]:
        word = "".join(rng.choice(letters) for _ in range(size))
        return f"{word}=", answer(word)

    return sample_row


def _build_rows(sample_row: RowSampler, rows: int, seed: int) -> list[TextRow]:
    """Return `rows` rows, or fewer if the task has fewer questions.

    Repeated questions are skipped, so that a held-out question does not occur in training.
    """
    rng = random.Random(seed)
    answers: dict[str, str] = {}
    for _ in range(rows + _SPARE):
        question, answer = sample_row(rng)
        answers[question] = answer
        if len(answers) == rows:
            break
    return [build_row(question, answer) for question, answer in answers.items()]


def build_pair_rows(
    numbers: Iterable[int],
    sign: str,
    seed: int,
    *,
    examples: Sequence[Message] = (),
    excluded: Sequence[tuple[int, int]] = (),
) -> list[TextRow]:
    """Return rows such as `What is 3 + 4?` in random order, after `examples`; 3 + 4 and 4 + 3 are in one group."""
    left_out = {tuple(sorted(pair)) for pair in excluded}
    pairs = [pair for pair in combinations_with_replacement(numbers, 2) if pair not in left_out]
    random.Random(seed).shuffle(pairs)
    return [
        build_row(f"What is {a} {sign} {b}?", str(OPERATIONS[sign](a, b)), examples=examples, group=f"{low} {high}")
        for low, high in pairs
        for a, b in dict.fromkeys([(low, high), (high, low)])
    ]
