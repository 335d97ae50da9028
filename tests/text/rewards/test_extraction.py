r"""Extraction of final answers, against the published GSM8K patterns of verl and lm-eval."""

import re
from collections.abc import Callable

import pytest

from embodyrl.text.answers import final_answer
from embodyrl.text.rewards.functions import gsm8k, gsm8k_flexible, math_reward

# (reply, answer, strict, flexible): 1 where the reward is 1.
REPLIES = [
    ("#### 12", "12", 1, 1),
    ("So he has 12.\n#### 12", "12", 1, 1),
    ("#### 12\n", "12", 1, 1),
    ("#### 13", "12", 0, 0),
    ("12", "12", 0, 1),
    ("The answer is 12.", "12", 0, 1),
    ("The answer is 12", "12", 0, 1),
    ("12 is the answer to all of it", "12", 0, 1),
    ("It is 12, not 13", "12", 0, 0),
    ("#### 5\nNo, wait.\n#### 12", "12", 1, 1),
    ("#### 12\nNo, wait.\n#### 5", "12", 0, 0),
    ("#### 1,234", "1234", 1, 1),
    ("#### 1234", "1,234", 1, 1),
    ("1,234 cars", "1234", 0, 1),
    ("#### 12.", "12", 1, 1),
    ("#### 12.0", "12", 1, 1),
    ("#### 12.00", "12", 1, 1),
    ("#### 12.5", "12.5", 1, 1),
    ("#### 12.5", "12", 0, 0),
    ("#### -5", "-5", 1, 1),
    ("#### -5", "5", 0, 0),
    ("#### 5", "-5", 0, 0),
    ("minus -5", "-5", 0, 1),
    ("#### $12", "12", 0, 1),
    ("#### 12$", "12", 1, 1),
    ("It costs $12", "12", 0, 1),
    ("It costs $12.50", "12.5", 0, 1),
    ("####12", "12", 0, 1),
    ("#### **12**", "12", 0, 1),
    ("### 12", "12", 0, 1),
    ("##### 12", "12", 1, 1),
    ("#### 12 apples", "12", 1, 1),
    ("#### 12 (3 times 4)", "12", 1, 0),
    ("#### 7 (3+4)", "7", 1, 0),
    ("#### x = 12", "12", 0, 1),
    ("#### the answer is 12", "12", 0, 1),
    ("####\n12", "12", 0, 1),
    ("#### \n12", "12", 0, 1),
    ("18 + 4", "22", 0, 0),
    ("#### 18 + 4", "22", 0, 0),
    ("#### 18+4", "22", 0, 0),
    ("18 + 4 = 22", "22", 0, 1),
    ("48/2", "24", 0, 0),
    ("#### 48/2", "24", 0, 0),
    ("48/2 = 24", "24", 0, 1),
    ("**12**", "12", 0, 1),
    ("\\boxed{12}", "12", 0, 1),
    ("$12$", "12", 0, 1),
    ("The answer is 12\u3002", "12", 0, 1),
    ("#### 12\u3002", "12", 1, 1),
    ("", "12", 0, 0),
    ("no number at all ...", "12", 0, 0),
    ("#### twelve", "12", 0, 0),
    ("#### ", "12", 0, 0),
    ("#### .", "12", 0, 0),
    ("1. add 2. double 3. done: 12", "12", 0, 1),
    ("12 apples and 3 pears", "12", 0, 0),
    ("18-4", "-4", 0, 0),
    ("20-4=16", "16", 0, 1),
    ("#### 12" + " and so on" * 40, "12", 1, 1),
    ("50%", "50", 0, 1),
    ("#### 50%", "50", 1, 1),
    ("1e3", "1000", 0, 1),
    ("#### 0", "0", 1, 1),
    ("#### 1 000", "1000", 0, 0),
    ("It is 1 000.", "1000", 0, 0),
    ("#### 1500001", "1500000", 0, 0),
    ("#### 1500000", "1500000", 1, 1),
    ("#### 123456889", "123456789", 0, 0),
    ("It is 2000001", "2000000", 0, 0),
    ("#### 2.0000001", "2", 0, 0),
    ("#### 0.1", "0", 0, 0),
    ("#### 100", "1000", 0, 0),
    ("#### 12345678901234567891", "12345678901234567890", 0, 0),
    ("It is 1\u202f000.", "1000", 0, 1),
]
THIN = REPLIES[-1][0]
LATE = next(reply for reply, *_ in REPLIES if len(reply) > 300)
VALUES = {"#### 12.0", "#### 12.00"}
"""Replies equal to 12 as numbers, not as text."""
DIFFER = {
    # verl looks at the last 300 characters, and compares text: with commas in the reference or, flexibly, in the reply.
    "verl strict": {*VALUES, "#### 12.", "#### 1234", LATE},
    "verl flexible": {
        *(*VALUES, "#### 12.", "The answer is 12.", "It costs $12.50", "18-4", "1e3", LATE),
        *("#### 1234", "#### 1,234", "1,234 cars", THIN),
    },
    # lm-eval takes the first of several ####, and compares text without commas, $ and a last point.
    "lm-eval strict": {*VALUES, "#### 5\nNo, wait.\n#### 12", "#### 12\nNo, wait.\n#### 5"},
    "lm-eval flexible": {*VALUES, "It costs $12.50", "18-4", "1e3", THIN},
}
"""Replies with other verdicts in verl or lm-eval."""


def verl(reply: str, answer: str, pattern: str) -> bool:
    """Return the verdict of verl's `gsm8k.compute_score`: the last match in 300 characters, compared as text."""
    found = [text for text in re.findall(pattern, reply[-300:]) if text not in ("", ".")]
    return bool(found) and (found[-1].replace(",", "") if "#" in pattern else found[-1]) == answer


def lm_eval(reply: str, answer: str, pattern: str, place: int) -> bool:
    """Return the verdict of lm-eval's task gsm8k: one match, compared as text without commas, $ and a last point."""
    found = ["".join(groups) for groups in re.findall(pattern, reply)] or ["[invalid]"]
    one, other = (re.sub(r",|\$|(?s:.*#### )|\.$", "", text) for text in (found[place], answer))
    return one == other


OTHERS: dict[str, tuple[int, Callable[[str, str], bool]]] = {
    "verl strict": (2, lambda reply, answer: verl(reply, answer, r"#### (\-?[0-9\.\,]+)")),
    "verl flexible": (3, lambda reply, answer: verl(reply, answer, r"(\-?[0-9\.\,]+)")),
    "lm-eval strict": (2, lambda reply, answer: lm_eval(reply, answer, r"#### (\-?[0-9\.\,]+)", 0)),
    "lm-eval flexible": (3, lambda reply, answer: lm_eval(reply, answer, r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1)),
}


@pytest.mark.parametrize(("reply", "answer", "strict", "flexible"), REPLIES)
def test_gsm8k_reward_uses_the_marked_or_last_number(reply, answer, strict, flexible):
    assert gsm8k("", reply, answer) == strict
    assert gsm8k_flexible("", reply, answer) == flexible


@pytest.mark.parametrize("name", OTHERS)
def test_gsm8k_matches_published_patterns_with_known_exceptions(name: str):
    assert len({row[0] for row in REPLIES}) >= 60
    column, judge = OTHERS[name]
    assert {row[0] for row in REPLIES if judge(row[0], row[1]) != row[column]} == DIFFER[name]


@pytest.mark.parametrize(
    ("reply", "reference", "worth"),
    [
        # Repeating the question, or another expression of the same value.
        ("18 + 4", "22", 0),
        ("48/2", "24", 0),
        ("2^3", "8", 0),
        ("9/18", "0.5", 0),
        (r"\boxed{18+4}", "22", 0),
        # Scientific notation is a number; other products with a power of ten are expressions.
        (r"\boxed{1.2\times 10^3}", "1200", 1),
        (r"\boxed{1.2 \cdot 10^{3}}", "1200", 1),
        (r"\boxed{-4 \times 10^{-2}}", "-0.04", 1),
        ("It is 1.2 \u00d7 10^3.", "1200", 1),
        ("It is 1.2 \u00d7 10^3.", "10", 0),
        ("1.2 \u00d7 10^3 m", "1200", 1),
        (r"\boxed{1200}", r"1.2 \times 10^3", 1),
        (r"\boxed{12\times 10^2}", "1200", 0),
        (r"\boxed{3 \times 10}", "30", 0),
        (r"\boxed{18 - -4}", "22", 0),
        (r"\boxed{44 - 22}", "22", 0),
        (r"\boxed{48/2}", "24", 0),
        (r"\boxed{\frac{48}{2}}", "24", 0),
        (r"\boxed{2\cdot 11}", "22", 0),
        (r"\boxed{2(11)}", "22", 0),
        (r"\boxed{\sqrt{4}}", "2", 0),
        (r"\boxed{4!}", "24", 0),
        (r"\boxed{2^3}", "8", 0),
        (r"\boxed{22 = 18+4}", "22", 0),
        (r"\boxed{22 (18+4)}", "22", 0),
        ("#### 18+4", "22", 0),
        # Right answers.
        (r"\boxed{18+4=22}", "22", 1),
        ("18+4=22", "22", 1),
        ("#### 12\nThat is all of 3.", "12", 1),
        ("#### 7 (3+4)", "7", 1),
        ("**12**", "12", 1),
        ("12\u3002", "12", 1),
        ("\uff11\uff12", "12", 1),
        ("\u22125", "-5", 1),
        ("-$5.00", "-5", 1),
        ("20-4", "4", 1),
        ("1e3", "1000", 1),
        ("1\u00a0234", "1234", 1),
        ("12kg", "12", 1),
        ("5 cm^2", "5", 1),
        ("2 1/2 cups", "2.5", 1),
        (r"\boxed{5} or \boxed{12}", "12", 1),
        (r"\boxed{12} or \boxed{5}", "12", 0),
        (r"\boxed{5}, no: #### 12", "12", 1),
        (r"\boxed{12 \text{ apples}}", "12", 1),
        (r"\boxed{5 \text{ cm}^2}", "5", 1),
        (r"\boxed{\text{12}}", "12", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{\$12}", "12", 1),
        (r"\boxed{100{,}000}", "100000", 1),
        (r"\boxed{1 000}", "1000", 1),
        (r"\boxed{-12 345 000.5 \text{ m}}", "-12345000.5", 1),
        (r"\boxed{10,\!000}", "10000", 1),
        (r"\boxed{1000}", r"1 000", 1),
        (r"\boxed{5 100/101}", "605/101", 1),
        (r"\boxed{1 00}", "100", 0),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{0.5}", r"50\%", 1),
        (r"\boxed{-\frac{3}{4}}", "-0.75", 1),
        (r"\boxed{\tfrac74}", "7/4", 1),
        # Expressions, whose form is free; the prompt is "Simplify \\sqrt{117}".
        (r"\boxed{3\sqrt{13}}", r"3\sqrt{13}", 1),
        (r"\boxed{\sqrt{117}}", r"3\sqrt{13}", 0),
        (r"\boxed{1+x^2}", "x^2+1", 1),
        (r"\boxed{(1,2)}", "(1,2)", 1),
        (r"\boxed{y}", "x", 0),
    ],
)
def test_math_extracts_the_last_box_or_number(reply: str, reference: str, worth: float):
    assert math_reward(r"Simplify \sqrt{117}", reply, reference) == worth


@pytest.mark.parametrize(
    "reply", ["\\boxed{5 " + "ab" * 20000 + "!}", "\\boxed{" * 5000, "9" * 50000, "1," * 9000, "\\frac{1}{2" * 5000]
)
def test_long_replies_without_answer_get_zero_reward(reply: str):
    assert math_reward("", reply, "7") == gsm8k_flexible("", reply, "7") == 0


def test_final_answer_is_found_at_any_depth_and_length():
    for depth in (1, 3, 20):
        assert final_answer(r"\boxed{ " * depth + "1,000" + "}" * depth) == "1000"
    assert final_answer(r"\boxed{" * 2000 + "1" + "}" * 2000).strip(r"\boxed{}") == "1"
    assert final_answer("answer (A) " + r"\text{" * 2000 + "}" * 2000) == "A"
    assert final_answer("<answer>7</answer>" + "<answer>" * 20_000) == "7"
    assert final_answer("The answer is (A). " + "B or C or " * 2000) == "A"
