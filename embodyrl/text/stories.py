"""Word problems in the style of GSM8K, generated from templates; some numbers occur only in validation."""

import random

from embodyrl.text.conversation import TextRow, build_row
from embodyrl.text.tasks import OPERATIONS

ROWS, HELD_OUT_ROWS = 2000, 500
_INSTRUCTION = 'Think step by step, and write the answer after "####".'
_LARGEST, _STEP, _RESERVED = 40, 5, 3
"""Exclusive upper bound of the numbers, and the modulus and remainder that identify validation numbers.

Numbers n with n mod 5 = 3 occur only in validation, and all other numbers only in training."""
_TRIES = 100
_NAMES = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lea")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stickers")


_STORIES = (
    (
        "{name} has {a} {things} and buys {b} more. Then {name} gives {c} of them to {other}. How many {things} does "
        "{name} have left?",
        "a + b; x - c",
    ),
    (
        "{name} buys {a} boxes with {b} {things} each. {c} of the {things} are broken. How many are not broken?",
        "a * b; x - c",
    ),
    (
        "A pack of {things} costs ${a}. {name} buys {b} packs and pays ${c} for delivery. How many dollars does {name} "
        "pay in total?",
        "a * b; x + c",
    ),
    (
        "{name} has {a} {things}. {other} has {b} more {things} than {name}, and gets {c} more from a friend. How many "
        "{things} does {other} have?",
        "a + b; x + c",
    ),
    (
        "{name} reads {a} pages on each of {b} days. The book has {c} pages more than that. How many pages does the "
        "book have?",
        "a * b; x + c",
    ),
    (
        "{name} earns ${a} per hour and works {b} hours on Monday and {c} hours on Tuesday. How many dollars does "
        "{name} earn on both days?",
        "b + c; a * x",
    ),
    (
        "A bus has {a} passengers. At the first stop {b} get on, and at the second stop {c} get off. How many "
        "passengers are on the bus?",
        "a + b; x - c",
    ),
    (
        "There are {a} bags with {b} {things} in each bag and {c} bags with {b} {things} in each bag. How many "
        "{things} are there?",
        "a + c; x * b",
    ),
    (
        "{name} collects {a} {things} in the morning and twice as many in the afternoon. {name} loses {b} and sells "
        "{c}. How many {things} are left?",
        "2 * a; a + x; y - b; z - c",
    ),
    (
        "{name} saves ${a} each week for {b} weeks and then spends ${c}. How many dollars does {name} still have?",
        "a * b; x - c",
    ),
)
"""Question, and steps of the solution separated by `; `. The results are named x, y, z, w; the last is the answer."""


def stories(*, rows: int = ROWS, seed: int = 0) -> list[TextRow]:
    """Return training rows; the reference is the solution, followed by `#### ` and the answer, as in GSM8K."""
    return _build_rows(rows, seed, held_out=False)


def held_out_stories(*, rows: int = HELD_OUT_ROWS, seed: int = 0) -> list[TextRow]:
    """Return validation rows; the numbers in their questions do not occur in training questions."""
    return _build_rows(rows, seed, held_out=True)


def _build_rows(rows: int, seed: int, *, held_out: bool) -> list[TextRow]:
    rng = random.Random(f"{seed}/{held_out}")
    numbers = [n for n in range(2, _LARGEST) if (n % _STEP == _RESERVED) == held_out]
    rows_by_question: dict[str, TextRow] = {}
    for _ in range(_TRIES * rows):
        if len(rows_by_question) == rows:
            break
        (text, solution), (name, other) = rng.choice(_STORIES), rng.sample(_NAMES, 2)
        a, b, c = (rng.choice(numbers) for _ in range(3))
        steps, result = _solve(solution, {"a": a, "b": b, "c": c, "2": 2})
        if result > 0:
            question = text.format(a=a, b=b, c=c, name=name, other=other, things=rng.choice(_THINGS))
            reference = "\n".join((*steps, f"#### {result}"))
            rows_by_question[question] = build_row(f"{question}\n{_INSTRUCTION}", reference)
    return list(rows_by_question.values())


def _solve(steps: str, numbers: dict[str, int]) -> tuple[list[str], int]:
    """Return the lines of a solution, such as `3 + 4 = 7`, and the answer."""
    variables, lines, result = dict(numbers), list[str](), 0
    for name, step in zip("xyzw", steps.split("; "), strict=False):
        left, sign, right = step.split()
        result = variables[name] = OPERATIONS[sign](variables[left], variables[right])
        lines.append(f"{variables[left]} {sign} {variables[right]} = {result}")
    return lines, result
