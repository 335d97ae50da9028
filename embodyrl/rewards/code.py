"""Reward of a program: it runs with tests in a sandbox."""

from __future__ import annotations

import json
import re

from embodyrl.sandbox import SECONDS, run_python


def code(prompt: str, response: str, reference: str) -> float:
    """Share of tests that the last code block of the response passes.

    `reference` is a JSON list of Python statements such as "assert f(2) == 4"; each one runs by itself.
    """
    blocks = re.findall(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    program = blocks[-1] if blocks else response
    tests: list[str] = json.loads(reference)
    passed = [run_python(f"{program}\n{test}\n", seconds=SECONDS / len(tests))[0] for test in tests]
    return sum(passed) / len(tests)
