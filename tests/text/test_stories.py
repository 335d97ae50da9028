"""Generated word problems: enough rows, right solutions, and numbers that only validation uses."""

from __future__ import annotations

import re

import pytest

from embodyrl.text.conversation import TextRow
from embodyrl.text.rewards.functions import gsm8k, gsm8k_flexible
from embodyrl.text.sandbox import calculate
from embodyrl.text.stories import held_out_stories, stories


def asked(rows: list[TextRow]) -> list[str]:
    return [row.messages[0].content for row in rows]


def numbers(rows: list[TextRow]) -> set[str]:
    return {number for text in asked(rows) for number in re.findall(r"[0-9]+", text)}


def test_validation_numbers_do_not_occur_in_training():
    training, validation = stories(), held_out_stories()
    assert len(training) >= 500
    assert len(validation) >= 500
    assert len(numbers(training)) > 20
    assert not numbers(training) & numbers(validation)
    assert len({*asked(training), *asked(validation)}) == len(training) + len(validation)


@pytest.mark.parametrize("rows", [stories(rows=300, seed=3), held_out_stories(rows=300, seed=3)])
def test_each_step_of_a_solution_is_correct_and_the_last_step_gives_the_answer(rows: list[TextRow]):
    for row in rows:
        *steps, answer = row.reference.split("\n")
        known = {*numbers([row]), "2"}
        for step in steps:
            expression, _, result = step.partition(" = ")
            assert float(calculate(expression)) == float(result) >= 0
            assert set(re.findall(r"[0-9]+", expression)) <= known
            known.add(result)
        assert answer == f"#### {steps[-1].rpartition(' ')[2]}"
        assert gsm8k("", row.reference, row.reference) == gsm8k_flexible("", f"It is {answer}.", row.reference) == 1


def test_solution_uses_every_number_of_the_question():
    for row in stories(rows=500):
        used = re.findall(r"[0-9]+", row.reference.rpartition("\n")[0])
        assert numbers([row]) <= {*used}, row


def test_rows_depend_on_the_seed_only():
    assert asked(stories(rows=20, seed=1)) == asked(stories(rows=20, seed=1)) != asked(stories(rows=20, seed=2))
