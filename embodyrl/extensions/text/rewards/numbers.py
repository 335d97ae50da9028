r"""Parser of numbers in replies: 1,234, 1e3, 1.2 \times 10^3, $5, 50 %, reduced fractions; no expressions."""

import re
from collections.abc import Iterator
from fractions import Fraction

_GROUP = r"(?:,(?:\\!)?|\{,\}|\\,|\\ |[\u00a0\u2009\u202f'])"
_DIGITS = rf"(?:[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_SIGN = r"(?P<sign>(?<![\w)\]}])[-+])?(?:\\?[$\u20ac\u00a3])?"
_PART = r"(?:\{{(?P<{0}>-?[0-9]+)\}}|(?P<{0}_short>[0-9]))"
_POWER = r"\ *(?:\\times|\\cdot|[\u00d7\u00b7])\ *10\ *\^\ *(?:\{\ *-?[0-9]{1,3}\ *\}|-?[0-9]{1,3}(?!\w))"
"""Regular expression of the power of ten in scientific notation."""
_NUMBER = re.compile(
    rf"""{_SIGN}(?<![\w.])(?<!\^)(?<!\^\{{)(?:
    (?:(?P<whole>[0-9]+)\ *)?\\[dt]?frac\ *{_PART.format("above")}\ *{_PART.format("below")}
    |(?:(?P<whole_plain>[0-9]+)\ +)?(?P<above_plain>[0-9]+)\ ?/\ ?(?P<below_plain>[0-9]+)(?![\w./])
    |(?P<plain>{_DIGITS})(?P<exponent>[eE][-+]?[0-9]{{1,3}}(?!\w)|{_POWER})?(?P<percent>\ *\\?%)?
    )""",
    re.VERBOSE,
)
_SPACED = re.compile(r"(?<![\w.^])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| ?/)")
"""Regular expression of a number with spaces between groups of three digits.

The flexible patterns of verl and lm-eval reject such a number in text, but accept it in a box.
"""
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|bm|boldsymbol)\s*\{([^{}]*)\}")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{[0-9]\}|[0-9])|\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_BESIDE = re.compile(
    r"""(?:[\s.,;:$%\u00b0\u20ac\u00a3*_~`]|\\[,;!:\ $%]|\\quad|\\(?:left|right)(?![A-Za-z])
    |/[a-z]++|[A-Za-z]{2,}+|[msghLlJNWVAKCF])*+""",
    re.VERBOSE,
)
_LONGEST = 100
"""Maximum length of a number in characters, because conversion of longer numbers is slow or fails."""
_ASCII = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {"\u2212": "-", "\ufe63": "-"}
)
Values = frozenset[Fraction]


def numbers(text: str) -> Iterator[tuple[re.Match[str], Values]]:
    """Yield the regex match and the set of possible values of each number in a string.

    The set is empty for unreduced fractions.
    """
    for match in _NUMBER.finditer(text.translate(_ASCII)):
        yield match, _values(match)


def _values(match: re.Match[str]) -> Values:
    if len(match[0]) > _LONGEST:
        return frozenset()
    sign = -1 if match["sign"] == "-" else 1
    if match["plain"]:
        value = sign * Fraction(re.sub(_GROUP, "", match["plain"]))
        if match["exponent"]:
            if "^" in match["exponent"] and not 1 <= abs(value) < 10:
                return frozenset()  # an expression
            value *= Fraction(10) ** int(re.findall(r"[-+]?[0-9]+", match["exponent"])[-1])
        return frozenset({value, value / 100} if match["percent"] else {value})
    above, below = (int(match[part] or match[f"{part}_short"] or match[f"{part}_plain"]) for part in ("above", "below"))
    if below < 2 or Fraction(above, below).denominator != below:
        return frozenset()
    return frozenset({sign * (int(match["whole"] or match["whole_plain"] or 0) + Fraction(above, below))})


def last_number(text: str) -> Values:
    """Return the possible values of the last number in a string."""
    return next((values for _, values in reversed([*numbers(text)])), frozenset())


def first_number(text: str) -> Values:
    """Return the possible values of the first number in a string."""
    return next((values for _, values in numbers(text)), frozenset())


def only_number(text: str) -> Values:
    """Return the possible values of a text that contains only a number and optionally `x =` and a unit; else empty."""
    text = _WRAPPED.sub(r" \1 ", text.rpartition("=")[2])
    text = _SPACED.sub(lambda match: match[0].replace(" ", ""), _UNIT_POWER.sub("", text))
    found = list(numbers(text))
    if len(found) != 1:
        return frozenset()
    match, values = found[0]
    beside = (text[: match.start()], text[match.end() :])
    return values if all(map(_BESIDE.fullmatch, beside)) else frozenset()


def equal(one: Values, other: Values) -> bool:
    """Return True if two numbers have a possible value in common, with a relative tolerance of 1e-6."""
    return any(abs(a - b) <= max(abs(a), abs(b)) / 10**6 for a in one for b in other)
