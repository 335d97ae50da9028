r"""Comparison of LaTeX expressions and words in `\boxed{}` with a reference."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from embodyrl.text.answers import chosen_letter
from embodyrl.text.rewards.numbers import only_number

_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|[,;:! ]|[dtc](?=frac))(?![A-Za-z]{2})|[\s~$]|\.$")
_STYLE = re.compile(r"\\(?:text(?:bf|it|rm|sc|normal)?|mbox|hbox|math(?:rm|bf|it|sf|tt|up))\s*\{([^{}]*)\}")
_NAMES = r"sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|lim|int|sum|prod|pi|frac|cdot|times|infty"
_TOKEN = re.compile(rf"\\?(?:{_NAMES})(?![a-z])|\\[A-Za-z]+|[A-Za-z]|[0-9]+(?:\.[0-9]+)?|[-+*/^=<>!|]")
_NEUTRAL = {"+", "*", "cdot", "times", "0", "1"}
_OPERATION = re.compile(
    r"[-+*/^=<>!]|\\?(?:frac|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|lim|int|sum|prod)(?![a-z])|\\[lg]eq?\b"
)
_MOST = 40
"""Maximum number of parts of a prompt that an answer is compared with."""


def equal_expressions(answer: str, reference: str, prompt: str) -> bool:
    r"""Return True if an answer has the value of the reference and is not a part of the prompt in another form.

    A reference in `\text{}` or of several letters is compared as words, and a single letter as a choice.
    """
    if _squeezed(answer) == _squeezed(reference):
        return bool(_squeezed(answer))
    if (said := _words(reference)) is not None:
        if re.fullmatch(r"[A-J]", said := said.strip("(). ")):
            return chosen_letter(f"\\boxed{{{answer}}}") == said
        return _plain(answer) == _plain(reference)
    exact, rough = (
        re.split(r"\\approx\b|\\simeq\b|\u2248", answer, maxsplit=1) if "approx" in answer else (answer, None)
    )
    if (rough is not None and only_number(rough) is None) or re.search(r"\\not\b|\\neq?\b|\u2260", exact):
        return False
    gold, found = _parsed(reference), _parsed(exact)
    if not gold or not found or not _verified(gold, found):
        return False
    sides = exact.split("=")
    if "=" not in reference and not all(_verified(gold, _parsed(side)) for side in sides[:-1] if _is_constant(side)):
        return False
    if len(sides) == 2 and not re.search("[=,]", reference + exact.replace("=", "", 1)):
        exact, found = sides[1], _parsed(sides[1])
    return not _restated(exact, reference, found, gold, prompt)


def _parsed(text: str) -> Any:
    from math_verify import parse

    # The parent limits the time; the package's own alarm would conflict with that limit.
    return parse(f"\\boxed{{{text}}}", parsing_timeout=0)


def _verified(gold: Any, found: Any) -> bool:
    from math_verify import verify

    return bool(verify(gold, found, timeout_seconds=None))


def _squeezed(text: str) -> str:
    return re.sub(r"\^\{(\w)\}", r"^\1", _LAYOUT.sub("", text)).replace("tfrac", "frac").strip(".")


def _words(reference: str) -> str | None:
    """Return the text of a reference that consists of words, or of a letter that names a choice; else None."""
    if whole := re.fullmatch(r"\s*\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf)\s*\{([^{}]*)\}[\s.]*", reference):
        return whole[1]
    return reference if re.fullmatch(r"\s*(?:\(?[A-J]\)?|[A-Za-z]{4,}(?:[ -][A-Za-z]+)*)\s*\.?\s*", reference) else None


def _plain(text: str) -> str:
    before = None
    while before != text:
        before, text = text, _STYLE.sub(r" \1 ", text)
    return " ".join(re.sub(r"\\[ ,;:!]|[^\w]+", " ", text.casefold()).split())


def _is_constant(side: str) -> bool:
    return re.search(r"\d|\\pi", side) is not None and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", side))


def _form(text: str) -> Counter[str]:
    """Return the numbers, symbols and operations of an expression, without neutral ones and in any order."""
    text = re.sub(r"([0-9]+)\s*/\s*([0-9]+)", r"\\frac{\1}{\2}", _LAYOUT.sub(" ", text))
    return Counter(t for m in _TOKEN.finditer(text) if (t := m[0].lstrip("\\")) not in _NEUTRAL)


def _restated(answer: str, reference: str, found: Any, gold: Any, prompt: str) -> bool:
    r"""Return True if the answer is a part of the prompt, also in another order or with terms such as + 0.

    An answer with the numbers, symbols and operations of the reference is never restated.
    """
    form = _form(answer)
    if form == _form(reference):
        return False
    simple = _evaluated(found)
    for part in _parts(prompt):
        same = _form(part) <= form and len(_form(part)) > 1
        if not same and (simple is None or simple == _evaluated(gold)):
            continue
        asked = _parsed(part)
        if asked and ((same and _verified(asked, found)) or (simple is not None and simple == _evaluated(asked))):
            return True
    return False


def _evaluated(parsed: Any) -> Any:
    """Return an expression with variables after the arithmetic of its numbers and equal terms; else None."""
    first = parsed[0]
    if not getattr(first, "free_symbols", None) or not hasattr(first, "doit") or getattr(first, "is_Relational", False):
        return None
    return first.doit(integrals=False)


def _parts(prompt: str) -> Iterator[str]:
    """Yield the expressions with an operation in a prompt, and their sides."""
    text = re.sub(r"\\(?:text\w*|mbox)\s*\{[^{}]*\}", " , ", prompt)
    split = rf"\$+|\\[()\[\]]|[.,;:?!](?:\s|$)|\n|(?<![\\A-Za-z])(?!(?:{_NAMES})(?![a-z]))[A-Za-z]{{2,}}"
    found: dict[str, None] = {}
    for part in re.split(split, text):
        sides = re.split(r"=|<|>|\\[lg]eq?\b", part)
        found |= dict.fromkeys(p.strip() for p in (part, *sides) if _OPERATION.search(p))
    yield from list(found)[:_MOST]
