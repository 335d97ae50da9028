"""Text rewards on correct, wrong and ambiguous replies."""

import pytest

from embodyrl.text.rewards.functions import countdown, exact, math_reward, number, overlap, tagged
from embodyrl.text.sandbox import calculate


@pytest.mark.parametrize(
    ("response", "reference", "worth"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        ("first 7, then 12", "12", 1.0),
        (r"\boxed{x=3}", "3", 1.0),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.0),
        ("no idea", "3", 0.0),
    ],
)
def test_math_reward_compares_values(response: str, reference: str, worth: float):
    assert math_reward("", response, reference) == worth


def test_exact_and_overlap_match_hand_computed_values():
    assert exact("", " abc ", "abc") == 1.0
    assert exact("", "abcd", "abc") == 0.0
    assert overlap("", "abc", "abc") == 1.0
    assert overlap("", "abx", "abc") == pytest.approx(3 / 4)
    assert overlap("", "ab", "abc") == pytest.approx(2 / 4)
    assert overlap("", "abcd", "abc") == pytest.approx(3 / 5)
    assert overlap("", "", "abc") == 0.0


def test_format_reward_requires_each_tag_once():
    assert tagged("", "<think>a</think>\n<answer>b</answer>", "") == 1.0
    assert tagged("", "<think>a</think><answer>b</answer> and more", "") == 0.0
    assert tagged("", "<think>a</think><answer>b</answer><answer>c</answer>", "") == 0.0


@pytest.mark.parametrize(
    ("response", "worth"),
    [
        *[("7*3+2", 1.0), ("2+3*7=23", 1.0), ("7+3+2", 0.5), ("23", 0.0), ("7*3+2+0", 0.0), ("7*3+", 0.0)],
        *[("7*3(2)", 0.0), (" 7 * 3 + 2\n", 1.0), ("7*3+2 = 23", 1.0), ("(7 * 3) + 2 = 23", 1.0), ("7\u00d73+2", 1.0)],
        *[(r"7 \times 3 + 2 = 23", 1.0), (r"\boxed{7 \cdot 3 + 2}", 1.0), ("$7*3+2$", 1.0), ("**7*3+2**", 1.0)],
        *[("<think>7+3+2=12</think><answer>7*3+2</answer>", 1.0), ("<answer>\n(7 * 3) + 2 = 23\n</answer>", 1.0)],
        *[
            ("<answer>7+3+2</answer>", 0.5),
            ("7*3+2 = 24", 0.0),
            ("7*3+2 = 23 = 7*3+2", 0.0),
            ("<answer>23</answer>", 0.0),
        ],
        *[("7 * 3 + 2 is 23", 0.0), ("7 plus 3", 0.0), ("7-3*2", 0.5), ("", 0.0), ("2 + 21", 0.0), ("7*3*2/2", 0.0)],
        *[
            ("(7*3+2)", 1.0),
            ("((7)*(3))+(2)", 1.0),
            ("7*(3+2)", 0.5),
            ("7*3/(2-2)", 0.0),
            ("07*3+2", 0.0),
            ("73+2", 0.0),
        ],
        *[("7**3+2", 0.0), ("7*3+2=23=23", 0.0), (r"\boxed{7*3+2 = 23}", 1.0), ("The answer: 7*3+2", 0.0)],
    ],
)
def test_countdown_reward_requires_each_number_once(response: str, worth: float):
    assert countdown("", response, "3,7,2:23") == countdown("", response, " 3, 7, 2: 23\n") == worth


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("3+7", "3,7,2:10"),
        ("3_7+2", "3,7,2:39"),
        ("3.7+2", "3,7,2:5.7"),
        ("True*11", "11:11"),
        ("\uff11+1", "1:2"),
        ("7*3+2#", "3,7,2:23"),
    ],
)
def test_countdown_reward_rejects_invalid_expressions(response: str, reference: str):
    assert countdown("", response, reference) == 0.0


def test_calculator_accepts_arithmetic_only():
    assert calculate("2*(3+4)") == "14"
    assert calculate("1/4") == "0.25"
    assert calculate("999999999 * 9000000") == "8999999991000000"
    assert calculate("1e300 * 2") == "2e+300", "300 digits would be inexact"
    for wrong in ("__import__('os')", "2**9", "1/0", "2+", "True*11"):
        with pytest.raises(ValueError, match=r"calculat|arithmetic"):
            calculate(wrong)


@pytest.mark.parametrize(
    ("reply", "paid"), [(" 12\n", 1), ("-1,234.5", 1), ("12 + 3", 0), ("It is 12", 0), ("12.", 0), ("1,23", 0), ("", 0)]
)
def test_format_reward_accepts_a_bare_number(reply: str, paid: int) -> None:
    assert number("", reply, "7") == paid
