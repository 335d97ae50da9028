"""Built-in rule-based reward functions of (prompt, response, reference)."""

import json
import logging
import re
import signal
from collections import Counter

from embodyrl.text.answers import find_boxes, find_chosen_letter, find_last_box
from embodyrl.text.rewards.expressions import are_equal_expressions
from embodyrl.text.rewards.numbers import (
    Number,
    are_equal,
    find_first_number,
    find_last_number,
    parse_single_number,
    restates_prompt,
)
from embodyrl.text.rewards.programs import find_program
from embodyrl.text.sandbox import TIMEOUT_S, evaluate, run_tests


def exact(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response equals the reference after stripping whitespace."""
    return float(response.strip() == reference.strip())


def overlap(prompt: str, response: str, reference: str) -> float:
    """Return the fraction of positions at which response and reference are equal: a dense version of `exact`.

    The end of the text counts as one more position.
    """
    actual, expected = [*response.strip(), None], [*reference.strip(), None]
    return sum(a == b for a, b in zip(actual, expected, strict=False)) / max(len(actual), len(expected))


_MARKER = "####"


def gsm8k(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the number after the last `#### ` is the reference, as in verl and the strict match of lm-eval."""
    matches = re.findall(r"#### (-?[0-9.,]+)", response)
    return float(bool(matches) and are_equal(find_last_number(matches[-1]), find_last_number(reference)))


def gsm8k_flexible(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the last number of the response is the reference, as in the flexible matches of verl and lm-eval."""
    return float(are_equal(find_last_number(response), find_last_number(reference)))


def number(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response is only a number, whether correct or not (format reward)."""
    return float(re.fullmatch(r"\s*[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?\s*", response) is not None)


class _Math:
    r"""Reward function that returns 1 if the answer equals the reference, else 0.

    The answer is the last `\boxed{}`, the number after the last `####`, or the last number of the answer or reply.

    Numbers are compared with numbers, so an expression such as 18 + 4 is not the answer 22. If the reference is an
    expression, a box is compared by the math-verify package. An answer that only repeats a part of the prompt gets 0.
    """

    def prepare(self) -> None:
        """Import the math-verify package in advance, so that the import does not count towards the time limit."""
        import math_verify  # noqa: F401

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides a warning for each answer

    def __call__(self, prompt: str, response: str, reference: str) -> float:
        expected = parse_single_number(reference)
        boxed = find_boxes(response)
        if not boxed or response.rfind(_MARKER) > boxed[-1][0]:
            _, marker, after_marker = response.rpartition(_MARKER)
            return float(are_equal(expected, find_first_number(after_marker) if marker else _named_number(response)))
        answer = find_last_box(response) or ""
        if expected is None:
            return float(are_equal_expressions(answer, reference, prompt))
        number = parse_single_number(answer)
        return float(
            are_equal(expected, number) and number is not None and not restates_prompt(number, expected, prompt)
        )


math_reward = _Math()


def _named_number(response: str) -> Number | None:
    """Return the number that the response names as its answer, or the last number of the response."""
    matches = re.findall(r"(?i)\banswer\b(?:\s+is)?[\s:*]*([^\n]+?)(?:[.!]?[*\s]*(?:\n|$)|[.!][*]*\s)", response)
    number = parse_single_number(matches[-1].replace("*", "")) if matches else None
    return number if number and number.is_simplified else find_last_number(response)


def choice(prompt: str, response: str, reference: str) -> float:
    r"""Return 1 if the chosen letter (boxed, in <answer>, named as the answer, or alone on a line) is the reference.

    Raises:
        ValueError: the reference is not a letter, optionally with the text of the option.
    """
    if not (expected := re.match(r"\s*\(?([A-Za-z])(?:[.):]|\s*$)", re.sub(r"\\text\w*\{(.*)\}|\$", r"\1", reference))):
        raise ValueError(f"the reference {reference[:40]!r} is not the letter of an option")
    return float(find_chosen_letter(response) == expected[1].upper())


def tagged(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response is <think>...</think> followed by <answer>...</answer>, each exactly once."""
    match = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL)
    return float(match is not None and len(re.findall(r"</?(?:think|answer)>", response)) == 4)


_SIGNS = {"\\times": "*", "\\cdot": "*", "\u00d7": "*", "\u00f7": "/", "\\div": "/", "\u2212": "-"}


def countdown(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response is an expression that uses each given number once and has the target value.

    `reference` contains the numbers and the target, for example `3,7,2:23`. The correct numbers with another value
    give 0.5.
    """
    numbers, _, target = "".join(reference.split()).partition(":")
    expression = (re.findall(r"(?s)<answer>(.*?)</answer>", response) or [find_last_box(response) or response])[-1]
    for sign, replacement in _SIGNS.items():
        expression = expression.replace(sign, replacement)
    expression = re.sub(rf"\s*=\s*{re.escape(target)}$", "", expression.strip(" \n$.`*"))
    if re.search(r"[^0-9+\-*/() ]", expression):
        return 0.0  # 3_7, 3.7 and True are not numbers of the list
    if Counter(re.findall(r"[0-9]+", expression)) != Counter(numbers.split(",")):
        return 0.0
    try:
        value = evaluate(expression)
    except ValueError:
        return 0.0
    return 1.0 if abs(value - float(target)) < 1e-6 else 0.5


def code(prompt: str, response: str, reference: str) -> float:
    """Return the fraction of tests that the program of the response passes (see `find_program`).

    `reference` is a JSON list of Python statements such as "assert f(2) == 4", and of {"input": ..., "output": ...} for
    programs that read and print. Each test runs in a separate process. The time limit of a test is one second, or an
    equal fraction of the total time if this is longer; the total time is most of `reward.timeout_s`.
    """
    tests: list[str | dict[str, str]] = json.loads(reference)
    seconds_left, _ = signal.getitimer(signal.ITIMER_REAL)
    return sum(run_tests(find_program(response, tests), tests, seconds=0.8 * seconds_left or TIMEOUT_S)) / len(tests)
