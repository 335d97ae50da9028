r"""Parser of numbers in replies: 1,234, 1e3, 1.2 \times 10^3, 10^5, $5, 50 %, 2 million, fractions; no expressions."""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

_GROUP = r"(?:,(?:\\!)?|\{,\}|\\,|\\ |[\u00a0\u2009\u202f'])"
_DIGITS = rf"(?>(?:[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_MONEY = r"(?:\\?[$\u20ac\u00a3\u00a5\u20b9]\ ?)"
_SIGN = rf"(?:{_MONEY}(?=-))?(?P<sign>(?<![\w)\]}}])[-+])?{_MONEY}?"
_PART = r"(?:\{{\ *(?P<{0}>-?[0-9]+)\ *\}}|(?P<{0}_short>[0-9]))"
_EXPONENT = r"(?:\{\ *-?[0-9]{1,3}\ *\}|-?[0-9]{1,3}(?!\w|\.[0-9]))"
_POWER = rf"\ *(?:\\times|\\cdot|[\u00d7\u00b7*])\ *10\ *\^\ *{_EXPONENT}"
"""Regular expression of the power of ten in scientific notation."""
_SCALES = {
    "%": Fraction(1, 100),
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_NUMBER = re.compile(
    rf"""{_SIGN}(?<![\w.])(?<!\^)(?<!\^\{{)(?:
    (?:(?P<whole>[0-9]+)\ *)?\\[dtc]?frac\ *{_PART.format("above")}\ *{_PART.format("below")}
    |(?:(?P<whole_plain>[0-9]+)\ +)?(?P<above_plain>[0-9]+)\ ?/\ ?(?P<below_plain>[0-9]+)(?![\w./])
    |(?P<base>[0-9]+)\ *\^\ *(?P<power>{_EXPONENT})
    |(?P<plain>{_DIGITS})(?!\ *\^\ *[{{]?\ *[-0-9])(?P<exponent>[eE][-+]?[0-9]{{1,3}}(?!\w)|{_POWER})?
    )(?:\ *(?P<scale>\\?%|percent\b|per\ cent\b|(?:hundred|thousand|million|billion|trillion)\b))?""",
    re.VERBOSE,
)
_SPACED = re.compile(r"(?<![\w.^])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| ?/)")
"""Regular expression of a number with spaces between groups of three digits.

The flexible patterns of verl and lm-eval reject such a number in text, but accept it in a box.
"""
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf|tt)|mbox|bm|boldsymbol|boxed)\s*\{([^{}]*)\}")
_UNIT_POWER = re.compile(
    r"(?<=[A-Za-z])\s*\^\s*(?:\{-?[0-9]\}|[0-9])|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?:s|\b)"
)
_CONTEXT = re.compile(
    r"""(?:[\s.,;:$%\u00b0\u20ac\u00a3\u00a5\u20b9*_~`()]|\\[,;!:\ $%]|\\quad|\\(?:left|right)(?![A-Za-z])
    |/[a-z]++|[A-Za-z]{2,}+|[msghLlJNWVAKCF])*+""",
    re.VERBOSE,
)
_OTHER_VALUE = re.compile(
    r"(?i)\b(?:not|no|never|isn|wrong|incorrect|false|or|and|than|least|most|between|except|factorial|half|mod|base|squared|"
    r"cubed|dozens?|root|minus|plus|negative)\b|\([^)]*$|^[^(]*\)"
)
_UNEQUAL = re.compile(r"\\not\b|\\n?eq\b(?<!\\eq)|\\ne\b|[\u2260<>]|!=")
_SIDES = re.compile(r":?=+|\\approx\b|\\simeq\b|\u2248")
_MAX_LENGTH = 100
"""Maximum length of a number in characters, because conversion of longer numbers is slow or fails."""
_ASCII = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {"\u2212": "-", "\ufe63": "-", "\u2013": "-", "\u2044": "/"}
)
_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")


class Number(NamedTuple):
    """Number in a text."""

    value: Fraction
    scale: Fraction = Fraction(1)
    """Factor of the unit: 1/100 for a percentage, 10**6 for millions."""
    form: str = ""
    """Notation: `/` for a fraction, `^` for a power, `%` or `million` for a number with this unit; otherwise empty."""
    parts: tuple[int, int] | None = None
    """Numerator and denominator, or base and exponent."""
    is_simplified: bool = True
    """False for fractions that are not reduced, and for powers whose base is not 10."""


def find_numbers(text: str) -> Iterator[tuple[re.Match[str], Number | None]]:
    """Yield the regex match and the value of each number in a string; None for numbers that are too long to convert."""
    for match in _NUMBER.finditer(_to_ascii(text)):
        yield match, _parse_number(match)


def _to_ascii(text: str) -> str:
    text = re.sub(r"[\u00bc-\u00be\u2150-\u215e]", lambda m: " " + unicodedata.normalize("NFKC", m[0]), text)
    text = re.sub(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    return text.translate(_ASCII)


def _parse_number(match: re.Match[str]) -> Number | None:
    if len(match[0]) > _MAX_LENGTH:
        return None
    sign = -1 if match["sign"] == "-" else 1
    unit = (match["scale"] or "").replace("\\", "").replace("percent", "%").replace("per cent", "%")
    scale = Fraction(_SCALES.get(unit, 1))
    if match["plain"]:
        value = sign * Fraction(re.sub(_GROUP, "", match["plain"]))
        if match["exponent"]:
            if "^" in match["exponent"] and not 1 <= abs(value) < 10:
                return None  # an expression
            value *= Fraction(10) ** int(re.findall(r"[-+]?[0-9]+", match["exponent"])[-1])
        return Number(value, scale, unit)
    if match["base"]:
        base, power = int(match["base"]), int(match["power"].strip("{ }"))
        if base == 0 or base > 10**6:
            return None
        return Number(sign * Fraction(base) ** power, scale, "^", (base, power), base == 10)
    numerator, denominator = (
        int(match[part] or match[f"{part}_short"] or match[f"{part}_plain"]) for part in ("above", "below")
    )
    if denominator == 0:
        return None
    numerator, denominator = (-numerator, -denominator) if denominator < 0 else (numerator, denominator)
    value = sign * (int(match["whole"] or match["whole_plain"] or 0) + Fraction(numerator, denominator))
    is_reduced = denominator > 1 and Fraction(numerator, denominator).denominator == denominator
    return Number(value, scale, "/", (numerator, denominator), is_reduced)


def find_last_number(text: str) -> Number | None:
    """Return the last number in a string, or None if the last number is an expression."""
    return next((n if n and n.is_simplified else None for _, n in reversed([*find_numbers(text)])), None)


def find_first_number(text: str) -> Number | None:
    """Return the first number in a string, or None if the first number is an expression."""
    return next((n if n and n.is_simplified else None for _, n in find_numbers(text)), None)


def parse_single_number(text: str) -> Number | None:
    """Parse a text that consists of a single number, with optional `x =` and unit; return None for any other text."""
    if _UNEQUAL.search(text):
        return None
    *earlier, text = _SIDES.split(text)
    if earlier and (left := parse_single_number(earlier[-1])) and not are_equal(left, parse_single_number(text)):
        return None
    text = _UNIT_POWER.sub("", _WRAPPED.sub(r" \1 ", _WRAPPED.sub(r" \1 ", _to_ascii(text))))
    text = re.sub(r"\{([^{}]*)\\over\b([^{}]*)\}", r"\\frac{\1}{\2}", text.replace("\\displaystyle", ""))
    signed = r"^[\s{(]*(?i:(?P<word>negative|minus)|(?P<sign>[-+]))(?:\s|\\[,;:! ])+(?=[\\$.0-9])"
    text = re.sub(signed, lambda match: match["sign"] or "-", text)
    text = re.sub(r"^\s*\{([^{}]*)\}\s*$", r"\1", text)
    text = re.sub(r"(?<=[0-9])(?:\\[,;: ])+(?=\\[dtc]?frac)", " ", text).replace("**", "^" if "10**" in text else "**")
    text = _SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    matches = list(find_numbers(text))
    if len(matches) != 1:
        return None
    match, number = matches[0]
    context = (text[: match.start()], text[match.end() :])
    joined = "0".join(context)
    return number if all(map(_CONTEXT.fullmatch, context)) and not _OTHER_VALUE.search(joined) else None


def are_equal(first: Number | None, second: Number | None) -> bool:
    """Return True if two numbers are equal; 50 % equals 0.5 and 50, and 2 million equals 2,000,000 and 2.

    Whole numbers and decimals must be equal exactly. A fraction without a finite decimal form, such as 1/3, equals a
    decimal within 1e-6 of its value.
    """
    if first is None or second is None:
        return False
    pairs = [(first.value * first.scale, second.value * second.scale)]
    if (first.scale == 1) != (second.scale == 1):
        pairs.append((first.value, second.value))
    return any(
        a == b or (_is_repeating(a) != _is_repeating(b) and abs(a - b) <= max(abs(a), abs(b)) / 10**6) for a, b in pairs
    )


def _is_repeating(value: Fraction) -> bool:
    """Return True if the decimal form of a number is infinite."""
    denominator = value.denominator
    twos = (denominator & -denominator).bit_length() - 1
    denominator >>= twos
    while denominator % 5 == 0:
        denominator //= 5
    return denominator != 1


def restates_prompt(answer: Number, reference: Number, prompt: str) -> bool:
    """Return True if the answer is a number of the prompt in a notation that differs from the reference's (6/8, 0.75).

    Unsimplified numbers such as 48/2 and 2^3 also count as restated if their value is shorter or without a prompt.
    """
    if answer.form == reference.form and (answer.is_simplified or answer.parts == reference.parts):
        return False
    if answer.scale != reference.scale and answer.value == reference.value:
        return False  # 12 % for 12
    if answer.parts:
        first, second = answer.parts
        if re.search(rf"(?<![\d.]){first}\D{{1,24}}{second}(?![\d.]*\d)", prompt):
            return True
        shorter = answer.form == "/" or len(str(answer.value)) <= len(f"{first}{second}")
        if not answer.is_simplified and (not prompt.strip() or (shorter and answer.value.denominator == 1)):
            return True
    return any(n and n.form == answer.form and n.value == answer.value for _, n in find_numbers(prompt))
