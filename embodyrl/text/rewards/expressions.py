r"""Comparison of LaTeX expressions and words in `\boxed{}` with a reference."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from embodyrl.text.answers import find_chosen_letter
from embodyrl.text.rewards.numbers import parse_single_number

_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|[,;:! ]|[dtc](?=frac))(?![A-Za-z]{2})|[\s~$]|\.$")
_STYLE = re.compile(r"\\(?:text(?:bf|it|rm|sc|normal)?|mbox|hbox|math(?:rm|bf|it|sf|tt|up))\s*\{([^{}]*)\}")
_NAMES = r"sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|lim|int|sum|prod|pi|frac|cdot|times|infty"
_TOKEN = re.compile(rf"\\?(?:{_NAMES})(?![a-z])|\\[A-Za-z]+|[A-Za-z]|[0-9]+(?:\.[0-9]+)?|[-+*/^=<>!|]")
_NEUTRAL = {"+", "*", "cdot", "times", "0", "1"}
_OPERATION = re.compile(
    r"[-+*/^=<>!]|\\?(?:frac|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|lim|int|sum|prod)(?![a-z])|\\[lg]eq?\b"
)
_HALF = r"\\?[dtc]?frac\s*(?:\{\s*1\s*\}|1)\s*(?:\{\s*2\s*\}|2)"
_ROOT = re.compile(rf"\^\s*(?:\{{\s*(?:{_HALF}|1\s*/\s*2|0?\.5)\s*\}}|{_HALF})")
_RECIPROCAL = re.compile(r"\^\s*\{\s*-\s*1\s*\}")
_MAX_PARTS = 40
"""Maximum number of parts of a prompt that an answer is compared with."""


def are_equal_expressions(answer: str, reference: str, prompt: str) -> bool:
    r"""Return True if an answer equals the reference and does not merely restate an expression of the prompt.

    Integrals, sums, products, limits and derivatives must be evaluated unless the reference contains them.
    A reference in `\text{}` or of several letters is compared as words, and a single letter as a choice.
    """
    if _normalize(answer) == _normalize(reference):
        return bool(_normalize(answer))
    if (expected := _extract_text(reference)) is not None:
        if re.fullmatch(r"[A-J]", expected := expected.strip("(). ")):
            return find_chosen_letter(f"\\boxed{{{answer}}}") == expected
        return _to_plain_words(answer) == _to_plain_words(reference)
    exact, approximate = (
        re.split(r"\\approx\b|\\simeq\b|\u2248", answer, maxsplit=1) if "approx" in answer else (answer, None)
    )
    if (approximate is not None and parse_single_number(approximate) is None) or re.search(
        r"\\not\b|\\neq?\b|\u2260", exact
    ):
        return False
    gold, parsed = _parse(reference), _parse(exact)
    if not gold or not parsed or not _is_equal(gold, parsed):
        return False
    sides = re.split(r"=(?![^{}]*\})", exact)  # not the = in the range of a sum
    if "=" not in reference and not all(_is_equal(gold, _parse(side)) for side in sides[:-1] if _is_constant(side)):
        return False
    if len(sides) > 1 and not re.search("[=,]", reference) and "," not in exact:
        exact, parsed = sides[-1], _parse(sides[-1])
        if not _is_equal(gold, parsed):
            return False
    if _find_unevaluated(parsed) - _find_unevaluated(gold):
        return False
    return not _restates_prompt(exact, reference, parsed, gold, prompt)


def _parse(text: str) -> Any:
    from math_verify import parse

    # The parent process limits the time, and the package's own alarm would conflict with this limit.
    return parse(f"\\boxed{{{text}}}", parsing_timeout=0)


def _is_equal(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))


def _find_unevaluated(parsed: Any) -> set[type]:
    """Return the types of the integrals, sums, products, limits and derivatives in a parsed expression."""
    from sympy import Derivative, Integral, Limit, Product, Sum

    found = parsed[0].atoms(Derivative, Integral, Limit, Product, Sum) if hasattr(parsed[0], "atoms") else ()
    return {type(part) for part in found}


def _normalize(text: str) -> str:
    return re.sub(r"\^\{(\w)\}", r"^\1", _LAYOUT.sub("", text)).replace("tfrac", "frac").strip(".")


def _extract_text(reference: str) -> str | None:
    """Return the text of a reference that consists of words, or of a letter that names a choice; else None."""
    if match := re.fullmatch(r"\s*\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf)\s*\{([^{}]*)\}[\s.]*", reference):
        return match[1]
    return reference if re.fullmatch(r"\s*(?:\(?[A-J]\)?|[A-Za-z]{4,}(?:[ -][A-Za-z]+)*)\s*\.?\s*", reference) else None


def _to_plain_words(text: str) -> str:
    previous = None
    while previous != text:
        previous, text = text, _STYLE.sub(r" \1 ", text)
    return " ".join(re.sub(r"\\[ ,;:!]|[^\w]+", " ", text.casefold()).split())


def _is_constant(side: str) -> bool:
    return re.search(r"\d|\\pi", side) is not None and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", side))


def _count_symbols(text: str) -> Counter[str]:
    r"""Count the numbers, symbols and operations in an expression, except neutral elements such as + and 1.

    Powers with the exponents 1/2 and -1 count as `\sqrt` and `\frac`.
    """
    text = _RECIPROCAL.sub(r" \\frac ", _ROOT.sub(r" \\sqrt ", _LAYOUT.sub(" ", text)))
    text = re.sub(r"([0-9]+)\s*/\s*([0-9]+)", r"\\frac{\1}{\2}", text)
    return Counter(token for match in _TOKEN.finditer(text) if (token := match[0].lstrip("\\")) not in _NEUTRAL)


def _restates_prompt(answer: str, reference: str, parsed: Any, gold: Any, prompt: str) -> bool:
    r"""Return True if the answer is a part of the prompt, possibly in another order or with terms such as + 0.

    An answer with the same numbers, symbols and operations as the reference is never a restatement.
    """
    symbols = _count_symbols(answer)
    if symbols == _count_symbols(reference):
        return False
    simplified = _simplify(parsed)
    for part in _split_prompt(prompt):
        same = _count_symbols(part) <= symbols and len(_count_symbols(part)) > 1
        if not same and (simplified is None or simplified == _simplify(gold)):
            continue
        prompt_value = _parse(part)
        if prompt_value and (
            (same and _is_equal(prompt_value, parsed))
            or (simplified is not None and simplified == _simplify(prompt_value))
        ):
            return True
    return False


def _simplify(parsed: Any) -> Any:
    """Return a parsed expression with its arithmetic carried out; None for an expression without variables."""
    first = parsed[0]
    if not getattr(first, "free_symbols", None) or not hasattr(first, "doit") or getattr(first, "is_Relational", False):
        return None
    return first.doit(integrals=False)


def _split_prompt(prompt: str) -> Iterator[str]:
    """Yield the expressions with an operation in a prompt, and their sides."""
    text = re.sub(r"\\(?:text\w*|mbox)\s*\{[^{}]*\}", " , ", prompt)
    split = rf"\$+|\\[()\[\]]|[.,;:?!](?:\s|$)|\n|(?<![\\A-Za-z])(?!(?:{_NAMES})(?![a-z]))[A-Za-z]{{2,}}"
    expressions: dict[str, None] = {}
    for part in re.split(split, text):
        sides = re.split(r"=|<|>|\\[lg]eq?\b", part)
        expressions |= dict.fromkeys(
            expression.strip() for expression in (part, *sides) if _OPERATION.search(expression)
        )
    yield from list(expressions)[:_MAX_PARTS]
