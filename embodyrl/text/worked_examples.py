"""Text tasks with worked examples in earlier turns: replies in a required format, or calculator calls."""

import re
from collections.abc import Sequence

from embodyrl.errors import ConfigError
from embodyrl.text.conversation import TextRow
from embodyrl.text.messages import Message
from embodyrl.text.tasks import build_pair_rows

_SUMS = ((2, 5), (14, 9), (6, 11), (17, 3))
_PRODUCTS = ((12, 34), (56, 71), (90, 18), (43, 25))
"""Operands of the examples; questions do not contain these pairs."""


def tagged_sums(*, largest: int = 20, shown: int = 2, seed: int = 0) -> list[TextRow]:
    """Return rows with sums; each row begins with `shown` (at most 4) examples in the format of the reward `format`."""
    examples: list[Message] = []
    for a, b in _select_examples(_SUMS, shown):
        text = f"<think>{a} + {b} = {a + b}</think><answer>{a + b}</answer>"
        question = Message(role="user", content=f"What is {a} + {b}?")
        examples += [question, Message(role="assistant", content=text)]
    return build_pair_rows(range(largest + 1), "+", seed, examples=examples, excluded=_SUMS)


def calculator_products(*, shown: int = 2, seed: int = 0) -> list[TextRow]:
    """Return rows with products of numbers in 10..99, each after `shown` (at most 4) example calculator calls."""
    examples: list[Message] = []
    for a, b in _select_examples(_PRODUCTS, shown):
        examples += [
            Message(role="user", content=f"What is {a} * {b}?"),
            *_build_calculator_call(a, b),
            Message(role="assistant", content=_format_conclusion(a, b)),
        ]
    return build_pair_rows(range(10, 100), "*", seed, examples=examples, excluded=_PRODUCTS)


def calculator_dialogues(*, seed: int = 0) -> list[TextRow]:
    """Return two SFT rows for each row of `calculator_products(shown=0)`, in the same order.

    The target of the first row is the calculator call. The second row contains the call and its result, and its target
    is the answer.
    """
    rows: list[TextRow] = []
    for row in calculator_products(shown=0, seed=seed):
        a, b = map(int, re.findall(r"[0-9]+", row.messages[-1].content))
        call = _build_calculator_call(a, b)
        rows.append(TextRow(messages=row.messages, reference=call[0].content, group=row.group))
        rows.append(TextRow(messages=(*row.messages, *call), reference=_format_conclusion(a, b), group=row.group))
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


def _build_calculator_call(a: int, b: int) -> tuple[Message, Message]:
    """Return the messages of a calculator call and its result."""
    return Message(role="assistant", content=f"?{a}*{b}"), Message(role="tool", content=str(a * b))


def _format_conclusion(a: int, b: int) -> str:
    return f"{a} * {b} = {a * b}"
