r"""Final answers of replies: the content of `\boxed{}`, the letter of a multiple-choice reply, or a number."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_ASCII = str.maketrans({chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {"\u3002": "."})
_STYLED = re.compile(
    r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt|sc|bb|up|normal)?|mbox|hbox|bm|boldsymbol|emph|underline)\s*\{([^{}]*)\}"
)
_OPENING = r"[(\[{<\u3010\u300c\"'\u2018\u201c]"
# Matches whole runs, also without a letter: a search from each opening character would take quadratic time.
_ENCLOSED = re.compile(rf"((?<=[\w)]){_OPENING})?+{_OPENING}++(?: *([A-Za-z]) *[)\]}}>\u3011\u300d\"'\u2019\u201d]+)?")
_CANDIDATE = re.compile(
    r"""(?<![A-Za-z0-9_\\'\u2019\u00b0^=+*-])(?:
    ([A-Za-z])\)
    |([B-HJ-Z])(?![A-Za-z0-9_'\u2019+^(-])(?!\ ?[=*]|\ [+-]\ [A-Za-z0-9]\b)
    |(A)(?=\s*(?:[.,;:!?\]}\n/&(\u2013\u2014]|-\ |$|(?:is|was|because|since|as|with|and|or|due|based|over|remains|not
        |(?i:the|my|final|correct)?\ ?(?i:answer|option|explanation))\b))
    |(I)(?=\s*(?:[.;:!?\]}\n]|$|(?:is|because)\b))
    |([a-j])(?=[.!]*\s*(?:\n|$))
    |(?<![^\n])([a-j])(?=[.:]\s)
    |(?<=nswer:\ )(A)(?=\ [A-Z0-9])
    )""",
    re.VERBOSE,
)
_MARK = r"\x02([A-Z])\x03\)?"
_GLUE = (
    r"(?:[\s,:=>\-\u2013\u2014\u2192]|\b(?:is|was|are|must|should|would|will|has|have|to|be|the|my|our|option|choice|letter|"
    r"answer|statement|correct|right|best|final|most|likely|probably|clearly|simply|definitely|therefore|thus|then|indeed|"
    r"hence|so|it|it's|that|that's|indicated|marked|labeled|given|by|just|actually)\b|\u662f|\u4e3a|\u9009\u9879|\u9009){0,16}+"
)
_NAMED = re.compile(
    rf"(?i)(?:\b(?:answer|ans|solution)\b\.?(?:\s(?:to|for|of|here)\b[^.:\n\x02]{{0,80}}?)??"
    r"|\b(?:option|choice|pick|selection|response|verdict|conclusion)\b\s*(?:is|was|(?:would|must|should) be|=|:|-+>?)"
    rf"|\u7b54\u6848|\u6545\u9009){_GLUE}{_MARK}"
)
"""Regular expression of a letter that is named as the answer, in English or Chinese."""
_LETTER_ON_OWN_LINE = re.compile(
    rf"(?im)(?:^|[!?]\s|(?<!\x03)(?<!\x03\))[.:;]\s)[^\w\x02\n]{{0,9}}(?:(?:option|choice)\s+)?{_MARK}[.!]*[^\S\n]*$"
)
_CHOSEN = re.compile(
    rf"(?i)(?:\b(?:choos(?:e|ing)|chose|select(?:ed|ing)?|pick(?:ed|ing)?|go(?:ing)? with|went with|opt(?:ed)? for|"
    rf"settle on|answer with)\b|\u9009\u62e9?){_GLUE}{_MARK}"
    rf"|(?:\b(?:so|thus|hence|therefore|consequently|it is|it's|it must be|that's|no|but|only|rather|leav(?:es|ing)"
    rf"(?: us with| only)?|left with|must be|should be)\b|\u6240\u4ee5|\u56e0\u6b64){_GLUE}{_MARK}"
    r"(?=\s*(?:[.!;,\n(]|$|remains|because|since|as\b|satisf|works|fits|match|holds))"
)
_CORRECT = re.compile(
    rf"(?i){_MARK}[\s,:(\-\u2013\u2014]*+(?:(?:is|was|must|should|would|be|remains|seems|as|clearly|definitely|indeed|"
    r"therefore|thus|the|only|single|most|also|our|my)\b\s*)*+(?:answer\b|(?:correct|right|best|accurate|appropriate)"
    r"(?:\s+(?:answer|choice|option|one|response|solution)\b|\s*(?:[.,;!)\n]|$|because|since|as\b|here)))"
)
_REJECTED = re.compile(
    r"(?i)[\s,:\-\u2013\u2014(]*(?:(?:is|was|are|were|would be|must be|can|could|does|do|seems|has been|being)\b)?\s*"
    r"(?:n't|not\b(?!\s*(?:option |choice )?\x02)|no\b|"
    r"cannot|can't|isn't|wasn't|doesn't|wrong|incorrect|false|invalid|impossible|ruled|eliminated|"
    r"excluded|out\b|\?|\u2717|\u2718|\u274c)"
)
_REJECTING = re.compile(
    r"(?i)(?:\bnot|n't|\bneither|\bnor|\bexcept|\bunlike|\bif|\bwhether|\beliminat\w+|\brul\w+ out|\bexclud\w+|"
    r"\breject\w+|\bdiscard\w+|\b(?:incorrect|wrong|false|tempting)(?:\s(?:answer|option|choice)s?)?(?:\s(?:is|was))?:?)"
    r"\s+(?:(?:the|option|choice|answer|that|think|believe)s?\s+)*$"
)
_FURTHER_LETTER = re.compile(
    rf"\s*(?:,|/|&|\+|\bor\b|\band\b|\u6216|\u548c|\u3001)+\s*(?:(?:or|and|also|maybe|perhaps|option|choice|the)\s+)*{_MARK}"
)
_REVISED = re.compile(
    r"(?i)\b(?:but|wait|actually|however|instead|correction|rather|sorry|mistake|re-?check|reconsider|hmm|oops|no|scratch|"
    r"on second)\b"
)
_LINKING = re.compile(
    r"(?i)\b(?:or|and|also|maybe|possibly|the|my|correct|final|best|right|option|choice|boxed)\b|[\W_]|[\x02\x03]"
)
_LISTED = re.compile(
    r"(?m)^[^\w\x02\n]*(?:[Oo]ption |[Cc]hoice )?\x02([A-Z])\x03(?:\)|[.:]|[^\S\n]?[-\u2013])[.:]?[^\S\n]*(\S.*)?$"
)
_RIGHT = re.compile(r"(?i)(?<!in)(?<!not )(?<!n't )\b(?:correct|right)\b|[\u2713\u2714\u2705]")


_LEVELS = 26
"""Maximum number of nested boxes or commands, and of consecutive letters; keeps the time linear in the text length."""


class _Letter(NamedTuple):
    letter: str
    start: int
    end: int


def find_boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and content of each outermost `\boxed{...}`, with any depth of braces."""
    closing_braces: dict[int, int] = {}
    open_braces: list[int] = []
    for match in re.finditer(r"(?s)\\.|[{}]", text):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            closing_braces[open_braces.pop()] = match.start()
    matches: list[tuple[int, int, str]] = []
    for match in re.finditer(r"\\f?boxed(?:\s*(\{)|\s+([^\s{}$\\]+))", text):
        end = closing_braces.get(match.start(1)) if match[1] else match.end() - 1
        if end is not None and (not matches or match.start() >= matches[-1][1]):
            matches.append((match.start(), end + 1, text[match.end() : end] if match[1] else match[2]))
    return matches


def find_last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, without a second box around the whole content; None without a box."""
    if not (matches := find_boxes(text)):
        return None
    content = matches[-1][2]
    for _ in range(_LEVELS):
        inner = find_boxes(content)
        if len(inner) != 1 or (content[: inner[0][0]] + content[inner[0][1] :]).strip(" $"):
            break
        content = inner[0][2]
    return content


def find_chosen_letter(reply: str) -> str | None:
    """Return the letter of the chosen option (upper case), or None if no letter or several letters are chosen.

    Reasoning in <think> is ignored. The result is the last letter that is boxed, in <answer>, named as the answer or on
    a separate line; else a letter that is chosen or called correct; else the only listed or mentioned letter.
    """
    reply = reply.rpartition("</think>")[2]
    if tags := re.findall(r"(?s)<answer>\s*(\S.*?)</answer>", _cut_after_tags(reply)):
        reply = tags[-1]
    text = _mark_letters("".join(_replace_boxes(reply)))
    named = _match_letters(text, _NAMED, _LETTER_ON_OWN_LINE)
    chosen, marked_correct = _match_letters(text, _CHOSEN), _match_letters(text, _CORRECT)
    if named:
        last = _select_last(text, named)
        later = [c for c in (*chosen, *marked_correct) if c.start >= named[-1].end]
        revised = [c for c in later if _REVISED.search(text[named[-1].end : c.end])]
        return revised[-1].letter if revised else last
    if chosen:
        return _select_last(text, chosen)
    if marked_correct:
        return _get_single(c.letter for c in marked_correct)
    listed = [(m[1], m[2] or "") for m in _LISTED.finditer(text)]
    if len({letter for letter, _ in listed}) > 1:
        return _get_single(letter for letter, comment in listed if _RIGHT.search(comment))
    first = re.match(rf"[^\w\x02]*(?:(?:option|choice)\s+)?{_MARK}(?!{_FURTHER_LETTER.pattern})", text)
    mentioned = [m for m in re.finditer(_MARK, text) if not _is_rejected(text, m)]
    return _get_single(m[1] for m in mentioned) if first or not re.search(r"(?i)\banswer\b", text) else None


def _replace_boxes(reply: str) -> Iterator[str]:
    r"""Yield the parts of a reply, with `\boxed{B}` as the line `answer: (B)`; boxes without a letter are empty."""
    end = 0
    for start, stop, content in find_boxes(reply):
        inside = _mark_letters(find_last_box(f"\\boxed{{{content}}}") or "")
        match = re.match(rf"(?i)\W*{_GLUE}{_MARK}", inside) if "\x02" in inside else None
        is_list = match is not None and _FURTHER_LETTER.match(inside, match.end())
        letters = {m[1] for m in re.finditer(_MARK, inside)} if is_list else set()
        answer = ", ".join(sorted({*letters, match[1]})) if match else ""
        yield reply[end:start]
        yield f" answer: {answer}. " if answer else " "
        end = stop
    yield reply[end:]


def _mark_letters(text: str) -> str:
    """Remove markup from a text, and enclose each letter that may name an option in control characters."""
    text = text.translate(_ASCII).translate(dict.fromkeys(map(ord, "*_`~#$\x02\x03")))
    for _ in range(_LEVELS):
        before, text = text, _STYLED.sub(r" \1 ", text)
        if before == text:
            break
    text = re.sub(r"</?[a-z]{1,8}>|\\[()\[\],;:! ]|\\(?:quad|left|right)\b", " ", text)
    text = _ENCLOSED.sub(lambda m: f"{m[1] or ''}{m[2]})" if m[2] else m[0], text)
    return _CANDIDATE.sub(lambda m: f"\x02{m[m.lastindex or 0].upper()}\x03{')' if m[1] else ''}", text)


def _match_letters(text: str, *patterns: re.Pattern[str]) -> list[_Letter]:
    """Return the letters that the patterns match and that the text does not reject, in order."""
    letters: dict[int, _Letter] = {}
    for match in (match for pattern in patterns for match in pattern.finditer(text)):
        group = match.lastindex or 0
        if not _is_rejected(text, match):
            letters.setdefault(match.end(group), _Letter(match[group], match.start(), match.end()))
    return [letters[end] for end in sorted(letters)]


def _is_rejected(text: str, match: re.Match[str]) -> bool:
    start = match.start(match.lastindex or 0)
    end = last = start + 2 + text.startswith(")", start + 2)
    for _ in range(_LEVELS):
        if not (also := _FURTHER_LETTER.match(text, last)):
            break
        last = also.end()
    if re.match(r"\s*(?:are|were)\b", text[last : last + 80]):
        end = last  # as in "A and C are wrong"
    before = (text[max(0, match.start() - 40) : match.start()], text[max(0, start - 41) : start - 1])
    return bool(_REJECTED.match(text, end)) or any(_REJECTING.search(part) for part in before)


def _select_last(text: str, letters: list[_Letter]) -> str | None:
    """Return the last letter, or None if it is one of several letters in a row."""
    last = letters[-1]
    also = _FURTHER_LETTER.match(text, last.end)
    is_stated = also and re.match(r"\s*(?:is|was|are|being|has|does|can|would)\b", text[also.end() :])
    if also and also[1] != last.letter and not is_stated and not _is_rejected(text, also):
        return None
    previous = next((other for other in letters[-2::-1] if other.letter != last.letter), None)
    return None if previous and not _LINKING.sub("", text[previous.end : last.start]) else last.letter


def _get_single(letters: Iterator[str]) -> str | None:
    distinct = set(letters)
    return distinct.pop() if len(distinct) == 1 else None


def final_answer(reply: str) -> str:
    """Return the final answer of a reply: the last LaTeX box, '#### n', <answer> tag, answer letter, or number."""
    if (box := find_last_box(reply)) is not None:
        return _remove_commas(box)
    tags = r"(?s)<answer>(.*?)</answer>"
    for pattern, text in ((r"#### (-?[0-9.,]*[0-9])", reply), (tags, _cut_after_tags(reply))):
        if matches := re.findall(pattern, text):
            return _remove_commas(matches[-1])
    if _match_letters(_mark_letters(reply), _NAMED) and (letter := find_chosen_letter(reply)):
        return letter
    matches = re.findall(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:/\d+)?", reply)
    return _remove_commas(matches[-1] if matches else reply)


def _cut_after_tags(reply: str) -> str:
    """Return a reply up to its last `</answer>`; a search for tags in the text after it would take quadratic time."""
    return reply[: reply.rfind("</answer>") + len("</answer>")]


def _remove_commas(answer: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())  # 1,000 is 1000, but (1,2) is not 12
