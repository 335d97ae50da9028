"""Programs in replies, and tests that cannot verify a program."""

import json

import pytest

from embodyrl.text.rewards.programs import find_program, find_reference_problems

pytestmark = pytest.mark.integration  # each program runs in a process of its own

PROGRAM = "def f(x):\n    return x+1\n"
BLOCK = f"```python\n{PROGRAM}```"
WRONG = "```python\ndef f(x):\n    return x\n```"
FORMS = {
    "block": BLOCK,
    "text block before": f"```text\nin 1, out 2\n```\nSo:\n{BLOCK}\n",
    "output block after": f"{BLOCK}\nOutput:\n```\n2\n```\n",
    "usage block after": f"{BLOCK}\nUsage:\n```python\nprint(f(1))\n```\n",
    "bash block after": f"{BLOCK}\n```bash\npython f.py\n```",
    **{
        tag: f"```{tag}\n{PROGRAM}```"
        for tag in ("py", "Python", "python3", "python ", "{.python}", 'python title="f"')
    },
    "no language": f"```\n{PROGRAM}```",
    "Windows line ends": BLOCK.replace("\n", "\r\n"),
    "indented in a list": "1. The code:\n   ```python\n   def f(x):\n       return x+1\n   ```",
    "not closed": f"```python\n{PROGRAM}",
    "fence in a docstring": "```python\ndef f(x):\n    '''\n    ```\n    f(1)\n    ```\n    '''\n    return x+1\n```",
    "four backticks": f"````python\n{PROGRAM}````",
    "tildes": f"~~~python\n{PROGRAM}~~~",
    "text before the fence": f"Here: {BLOCK}",
    "tag after the fence": f"<answer>\n{BLOCK}</answer>",
    "draft before": f"<think>\n{WRONG}\n</think>\n{BLOCK}",
    "block not closed before the next": f"```python\nimport math\n{BLOCK}",
    "two parts": "```python\nONE = 1\n```\nThen:\n```python\ndef f(x):\n    return x+ONE\n```",
    "no block": PROGRAM,
    "lists after the program": f"{PROGRAM}\n1. It adds one (to x):\n- f(1) is 2.\n",
    "unfinished call after the program": f"{PROGRAM}print(f(1),\n",
    "prose without a block": f"The program:\n\n{PROGRAM}\nIt adds one.",
}


@pytest.mark.parametrize("form", FORMS)
def test_common_program_formats_are_extracted(form: str):
    names: dict = {}
    exec(find_program(FORMS[form], ["assert f(1) == 2"]), names)
    assert names["f"](1) == 2


def test_program_that_reads_its_input_is_preferred_for_tests_of_output():
    reply = "```python\nprint(input())\n```\nFor example:\n```python\nx = 1\n```"
    assert find_program(reply, [{"input": "1", "output": "1"}]) == "print(input())\n"


REPEATED = {
    "blanks": " " * 60_000 + "x",
    "backticks": "`" * 60_000 + "x`",
    "open blocks": "```python\nx=(\n" * 2_500,
    "fences in a docstring": "```python\n'''\n" + "```\n" * 12_000,
    "open parentheses": "def f(x):\n" + "  return (\n" * 8_000,
    "branches": "if 1: pass\n" + "elif 1: pass\n" * 5_000,
}


@pytest.mark.parametrize("form", REPEATED)
def test_program_search_in_a_degenerate_reply_ends_before_the_timeout(form: str):
    assert isinstance(find_program(REPEATED[form], ["assert f(1) == 2"]), str)


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert f(2) = 4", "is not valid Python"),
        ("def check(g):\n    assert g(2) == 4", "calls nothing"),
        ("assert_same(f(2), 4)", "calls assert_same"),
        ("class B(A):\n    pass\nassert B().f() == 1", "derives class B from A"),
        ("match f(1):\n    case P(x=1): pass", "matches a pattern of P"),
        ("from unittest.mock import patch\nwith patch('builtins.input'):\n    f(1)", "uses patch"),
        ("assert eval(f(2)) == 4", "uses eval"),
        ("def check(x):\n    assert f(x) == 4\neach([1], check)", "passes check to the program"),
        ("from sympy.parsing.sympy_parser import parse_expr\nassert parse_expr(f(2)) == 4", "imports sympy"),
        ("from pickle import loads\nassert loads(f(2)) == 4", "imports pickle"),
        ({"input": "1"}, "is neither a text nor"),
    ],
)
def test_tests_that_cannot_verify_a_program_are_reported(test, why: str):
    (found,) = find_reference_problems(json.dumps([test]))
    assert found.startswith("test 1 ")
    assert why in found


def test_valid_tests_and_references_are_checked():
    good = ["assert f(2) == 4", "from numpy.testing import assert_equal\nassert_equal(f(2), 4)"]
    good += ["assert_allclose(f(2), 4)", "class Mine(OwnError):\n    pass\nassert f(Mine) == 1"]
    assert find_reference_problems(json.dumps([*good, {"input": "", "output": ""}])) == []
    assert (
        find_reference_problems("[]")
        == find_reference_problems("4")
        == ["the answer must be a JSON list of at least one test"]
    )
