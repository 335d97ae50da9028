"""Rewards that need nothing but the text."""

import json
import re
import signal
from collections import Counter

from embodyrl.sandbox import SECONDS, evaluate, run_tests


def exact(prompt: str, response: str, reference: str) -> float:
    """1 if the response is the reference, but for blanks at both ends."""
    return float(response.strip() == reference.strip())


def overlap(prompt: str, response: str, reference: str) -> float:
    """Share of places where response and reference agree, the end of the text included; a dense form of `exact`."""
    said, wanted = [*response.strip(), None], [*reference.strip(), None]
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


class _Math:
    """1 if the answer is mathematically equal to the reference: the last boxed expression, else the last number.

    Parsing and comparison are those of the math-verify package.
    """

    def prepare(self) -> None:
        """Import the package, before the time of any answer runs."""
        import math_verify  # noqa: F401

    def __call__(self, prompt: str, response: str, reference: str) -> float:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        # Time is limited by the judge; the package's own alarm would fight with it.
        gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=0)
        configs = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
        answer = parse(response, extraction_config=configs, extraction_mode="first_match", parsing_timeout=0)
        return float(verify(gold, answer, timeout_seconds=None))


math = _Math()


def choice(prompt: str, response: str, reference: str) -> float:
    """1 if the chosen letter is the reference: in a box, after 'answer', or else the last one that stands alone."""
    for pattern in (r"\\boxed\{\(?([A-Z])\)?\}", r"(?i:answer)(?:\s+is)?\s*:?\s*\(?([A-Z])\b", r"\b([A-Z])\b"):
        if found := re.findall(pattern, response):
            return float(found[-1] == reference.strip().strip("()").upper())
    return 0.0


def tagged(prompt: str, response: str, reference: str) -> float:
    """1 if the response is <think>...</think> and then <answer>...</answer>, each once and nothing else."""
    whole = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL)
    return float(whole is not None and len(re.findall(r"</?(?:think|answer)>", response)) == 4)


def countdown(prompt: str, response: str, reference: str) -> float:
    """1 if the response is an expression of exactly the given numbers with the given value.

    `reference` is `3,7,2:23`. Half credit is for the right numbers with another value.
    """
    numbers, _, target = reference.partition(":")
    expression = response.strip().removesuffix(f"={target}")
    if re.search(r"[^0-9+\-*/() ]", expression):
        return 0.0  # 3_7, 3.7 and True are no numbers of the list
    if Counter(re.findall(r"[0-9]+", expression)) != Counter(numbers.split(",")):
        return 0.0
    try:
        value = evaluate(expression)
    except ValueError:
        return 0.0
    return 1.0 if abs(value - float(target)) < 1e-6 else 0.5


def code(prompt: str, response: str, reference: str) -> float:
    """Share of tests that the last code block of the response passes.

    `reference` is a JSON list of Python statements such as "assert f(2) == 4"; each one runs by itself, after the
    program, within a second (or its share of the time, if that is longer). All of them share most of what the judge
    gives the answer.
    """
    blocks = re.findall(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    program = blocks[-1] if blocks else response
    tests: list[str] = json.loads(reference)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    return sum(run_tests(program, tests, seconds=0.8 * left or SECONDS)) / len(tests)
