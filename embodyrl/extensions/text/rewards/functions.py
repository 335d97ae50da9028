"""Built-in rule-based reward functions of (prompt, response, reference)."""

import json
import logging
import re
import signal
from collections import Counter

from embodyrl.extensions.text.rewards.numbers import equal, first_number, last_number, only_number
from embodyrl.extensions.text.sandbox import SECONDS, evaluate, run_tests


def exact(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response equals the reference after stripping whitespace."""
    return float(response.strip() == reference.strip())


def overlap(prompt: str, response: str, reference: str) -> float:
    """Return the fraction of positions at which response and reference are equal: a dense version of `exact`.

    The end of the text counts as one more position.
    """
    said, wanted = [*response.strip(), None], [*reference.strip(), None]
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


_BOX = re.compile(r"\\boxed\s*+\{((?:[^{}]++|\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})*+)\}")
_MARKER = "####"


def gsm8k(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the number after the last `#### ` is the reference, as in verl and the strict match of lm-eval."""
    found = re.findall(r"#### (-?[0-9.,]+)", response)
    return float(bool(found) and equal(last_number(found[-1]), last_number(reference)))


def gsm8k_flexible(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the last number of the response is the reference, as in the flexible matches of verl and lm-eval."""
    return float(equal(last_number(response), last_number(reference)))


def number(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response is only a number, whether correct or not (format reward)."""
    return float(re.fullmatch(r"\s*[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?\s*", response) is not None)


class _Math:
    r"""Reward 1 if the answer (the last `\boxed{}`, `####` or plain number) has the value of the reference, else 0.

    Numbers are compared with numbers, so an expression such as 18 + 4 is not the answer 22. If the reference is an
    expression, a box is compared by the math-verify package, unless it only repeats a part of the prompt.
    """

    def prepare(self) -> None:
        """Import the math-verify package in advance, so that the import does not count towards the time limit."""
        import math_verify  # noqa: F401

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns of each answer that its clock is off

    def __call__(self, prompt: str, response: str, reference: str) -> float:
        wanted = only_number(reference)
        box = list(_BOX.finditer(response))[-1:]
        if not box or response.rfind(_MARKER) > box[0].start():
            _, marker, marked = response.rpartition(_MARKER)
            return float(equal(wanted, first_number(marked) if marker else last_number(response)))
        answer = box[0][1]
        if wanted:
            return float(equal(wanted, only_number(answer)))
        if _squeezed(answer) in _squeezed(prompt) and _squeezed(answer) != _squeezed(reference):
            return 0.0
        from math_verify import parse, verify

        # The parent limits the time; the package's own alarm would conflict with that limit.
        gold, found = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (reference, answer))
        return float(verify(gold, found, timeout_seconds=None))


math = _Math()


def _squeezed(text: str) -> str:
    return "".join(text.split())


def choice(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the chosen letter (in a box, after 'answer', or the last single letter) is the reference."""
    for pattern in (r"\\boxed\{\(?([A-Z])\)?\}", r"(?i:answer)(?:\s+is)?\s*:?\s*\(?([A-Z])\b", r"\b([A-Z])\b"):
        if found := re.findall(pattern, response):
            return float(found[-1] == reference.strip().strip("()").upper())
    return 0.0


def tagged(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response is <think>...</think> followed by <answer>...</answer>, each exactly once."""
    whole = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL)
    return float(whole is not None and len(re.findall(r"</?(?:think|answer)>", response)) == 4)


def countdown(prompt: str, response: str, reference: str) -> float:
    """Return 1 if the response is an expression of exactly the given numbers with the given value.

    `reference` is `3,7,2:23`. The right numbers with another value give half the reward.
    """
    numbers, _, target = reference.partition(":")
    expression = response.strip().removesuffix(f"={target}")
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
    """Return the fraction of tests that the last code block of the response passes.

    `reference` is a JSON list of Python statements such as "assert f(2) == 4", and of {"input": ..., "output": ...} for
    programs that read and print. Each test runs in a separate process. A test has a second,
    or its share of the total time if that is longer; the total is most of `reward.timeout_s`.
    """
    blocks = re.findall(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    program = blocks[-1] if blocks else response
    tests: list[str | dict[str, str]] = json.loads(reference)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    return sum(run_tests(program, tests, seconds=0.8 * left or SECONDS)) / len(tests)
