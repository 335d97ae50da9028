"""Text tasks with worked examples in earlier turns: replies in a required format, or calculator calls."""

import random
import re
from collections.abc import Sequence

from embodyrl.errors import ConfigError
from embodyrl.text.conversation import TextRow
from embodyrl.text.messages import Message

_SUMS = ((2, 5), (14, 9), (6, 11), (17, 3))
_PRODUCTS = ((12, 34), (56, 71), (90, 18), (43, 25))
"""Operands of the examples; questions do not contain these pairs."""


def tagged_sums(*, largest: int = 20, shown: int = 2, seed: int = 0) -> list[TextRow]:
    """Return rows with sums; each row begins with `shown` (at most 4) examples in the format of the reward `format`."""
    examples: list[Message] = []
    for a, b in _select_examples(_SUMS, shown):
        text = f"<think>{a} + {b} = {a + b}</think><answer>{a + b}</answer>"
        examples += [_user_message(f"What is {a} + {b}?"), Message(role="assistant", content=text)]
    pairs = [(a, b) for a in range(largest + 1) for b in range(a, largest + 1)]
    return _build_rows(examples, pairs, _SUMS, "+", seed)


def calculator_products(*, shown: int = 2, seed: int = 0) -> list[TextRow]:
    """Return rows with products of numbers in 10..99, each after `shown` (at most 4) example calculator calls."""
    examples: list[Message] = []
    for a, b in _select_examples(_PRODUCTS, shown):
        examples += [
            _user_message(f"What is {a} * {b}?"),
            *_calculator_call(a, b),
            Message(role="assistant", content=_conclusion(a, b)),
        ]
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    return _build_rows(examples, pairs, _PRODUCTS, "*", seed)


def calculator_dialogues(*, seed: int = 0) -> list[TextRow]:
    """Return two SFT rows for each row of `calculator_products(shown=0)`, in the same order.

    The target of the first row is the calculator call. The second row contains the call and its result, and its target
    is the answer.
    """
    rows: list[TextRow] = []
    for row in calculator_products(shown=0, seed=seed):
        a, b = map(int, re.findall(r"[0-9]+", row.messages[-1].content))
        call = _calculator_call(a, b)
        rows.append(TextRow(messages=row.messages, reference=call[0].content, group=row.group))
        rows.append(TextRow(messages=(*row.messages, *call), reference=_conclusion(a, b), group=row.group))
    return rows


def _select_examples(examples: Sequence[tuple[int, int]], shown: int) -> Sequence[tuple[int, int]]:
    """Return the first `shown` examples.

    Raises:
        ConfigError: there are fewer examples.
    """
    if not 0 <= shown <= len(examples):
        raise ConfigError(
            f"data.kwargs.shown={shown}: there are {len(examples)} worked examples. Set 0 to {len(examples)}."
        )
    return examples[:shown]


def _calculator_call(a: int, b: int) -> tuple[Message, Message]:
    """Return the messages of a calculator call and its result."""
    return Message(role="assistant", content=f"?{a}*{b}"), Message(role="tool", content=str(a * b))


def _conclusion(a: int, b: int) -> str:
    return f"{a} * {b} = {a * b}"


def _user_message(text: str) -> Message:
    return Message(role="user", content=text)


def _build_rows(
    examples: Sequence[Message],
    pairs: list[tuple[int, int]],
    excluded: Sequence[tuple[int, int]],
    sign: str,
    seed: int,
) -> list[TextRow]:
    """Return rows such as `What is 3 + 4?` in random order; 3 + 4 and 4 + 3 are in one group."""
    left_out = {tuple(sorted(pair)) for pair in excluded}
    pairs = [pair for pair in pairs if pair not in left_out]
    random.Random(seed).shuffle(pairs)
    return [
        TextRow(
            messages=(*examples, _user_message(f"What is {a} {sign} {b}?")),
            reference=str(a + b if sign == "+" else a * b),
            group=f"{min(a, b)} {max(a, b)}",
        )
        for first, second in pairs
        for a, b in dict.fromkeys([(first, second), (second, first)])
    ]
