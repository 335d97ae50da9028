"""Rows with worked examples: the examples satisfy the reward or the tool that they show."""

import re
from collections.abc import Callable

import pytest

from embodyrl.envs.text.environment import execute_calls, find_calls
from embodyrl.errors import ConfigError
from embodyrl.text.conversation import TextRow
from embodyrl.text.rewards.functions import gsm8k_flexible, tagged
from embodyrl.text.worked_examples import calculator_dialogues, calculator_products, tagged_sums


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"[0-9]+", text)))


@pytest.mark.parametrize(("rows", "count"), [(tagged_sums(shown=4), 433), (calculator_products(shown=4), 8092)])
def test_every_operand_pair_occurs_in_both_orders_and_never_in_the_examples(rows: list[TextRow], count: int):
    asked = [numbers(row.messages[-1].content) for row in rows]
    assert len({*asked}) == len(asked) == count
    assert {pair[::-1] for pair in asked} == {*asked}
    examples = {numbers(m.content) for m in rows[0].messages[:-1] if m.role == "user"}
    assert len(examples) == 4
    assert not {*asked} & {*examples, *(pair[::-1] for pair in examples)}
    first = [row.group for row in rows]
    assert all(first.index(group) in (i, i - 1) for i, group in enumerate(first[:100]))


def test_example_replies_have_the_rewarded_format_and_the_correct_answer():
    row = tagged_sums(shown=3)[0]
    turns = row.messages[:-1]
    for asked, reply in zip(turns[::2], turns[1::2], strict=True):
        assert tagged("", reply.content, "") == 1
        assert gsm8k_flexible("", reply.content, str(sum(numbers(asked.content)))) == 1
    assert row.reference == str(sum(numbers(row.messages[-1].content)))


def test_example_calls_contain_calculator_results():
    row = calculator_products(shown=3)[0]
    turns = row.messages[:-1]
    for call, told, reply in zip(turns[1::4], turns[2::4], turns[3::4], strict=True):
        found = find_calls(call.content, ["calculator"])
        assert found is not None
        assert execute_calls(found, ["calculator"]) == told.content
        assert gsm8k_flexible("", reply.content, told.content) == 1
    a, b = numbers(row.messages[-1].content)
    assert row.reference == str(a * b)


@pytest.mark.parametrize("rows", [tagged_sums, calculator_products])
@pytest.mark.parametrize("shown", [-1, 5])
def test_requesting_too_many_worked_examples_raises_an_error(rows: Callable[..., list[TextRow]], shown: int):
    with pytest.raises(ConfigError, match=f"shown={shown}: there are 4"):
        rows(shown=shown)


def test_dialogues_call_the_calculator_and_repeat_its_result():
    rows, products = calculator_dialogues(seed=1), calculator_products(shown=0, seed=1)
    assert len(rows) == 2 * len(products)
    for first, second, product in zip(rows[:40:2], rows[1:40:2], products, strict=False):
        call = find_calls(first.reference, ["calculator"])
        assert call is not None
        assert first.messages == product.messages
        assert [(m.role, m.content) for m in second.messages[1:]] == [
            ("assistant", first.reference),
            ("tool", execute_calls(call, ["calculator"])),
        ]
        assert gsm8k_flexible("", second.reference, product.reference) == 1
        assert first.group == second.group == product.group
