"""Programs in replies of a language model, and their tests."""

import ast
import builtins
import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from embodyrl.text.sandboxed_tests import find_problems, find_program_names

Test = str | Mapping[str, str]
# Without backtracking, which is quadratic for lines of blanks or backticks.
_FENCE = re.compile(
    r"(?P<indent>[ \t]*+)(?P<lead>.{0,2000}?)(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)[ \t]*+\{?+\.?+(?P<tag>\w*+)[^`]*+"
)
_MAX_ENDS = 64
"""Maximum number of lines of a reply that are tried as the end of a program."""
_STARTS_CODE = re.compile(r"(?:import|from|def|class|async)\b|@")
_READS_INPUT = re.compile(r"\binput\(|\bstdin\b|open\(0")


def find_program(response: str, tests: Sequence[Test]) -> str:
    """Return the program in a reply: the last Python block that defines a name that the tests use.

    For tests of output, the last block that reads the input is preferred. Earlier blocks are included if they define
    names that the selected block uses. Blocks without a language are used only if no block is marked as Python.
    """
    fenced = _find_blocks(response)
    blocks = [text for tag, text in fenced if tag.lower().startswith("py")] or [
        block_text for tag, block_text in fenced if not tag
    ]
    if not blocks:
        return _remove_prose(response)
    test_names = {name for test in tests if isinstance(test, str) for name in find_program_names(test)}
    index = max(range(len(blocks)), key=lambda i: (*_rank_block(blocks[i], test_names), i))
    program, missing = blocks[index], _get_names(blocks[index], ast.Load)
    defined = _get_defined_names(program)
    for block in blocks[index - 1 :: -1] if index else ():
        names = _get_defined_names(block)
        if missing & names - defined:
            program = f"{block}\n{program}"
            defined |= names
            missing |= _get_names(block, ast.Load)
    return program


def _remove_prose(response: str) -> str:
    """Return the longest program in a reply without code blocks, or the whole reply if none is valid Python."""
    if _is_valid(response):
        return response
    lines = response.split("\n")
    first = next((i for i, line in enumerate(lines) if _STARTS_CODE.match(line)), 0)
    end = len(lines)
    for _ in range(_MAX_ENDS):
        text = "\n".join(lines[first:end])
        try:
            ast.parse(textwrap.dedent(text))
        except SyntaxError as error:  # no program contains this line
            end = first + min(end - first, error.lineno or 0) - 1
        except (ValueError, RecursionError, MemoryError):
            break
        else:
            return text
        if end <= first:
            break
    return response


def _rank_block(block: str, test_names: Collection[str]) -> tuple[bool, bool]:
    """Return a sort key that ranks how well a block fits the tests."""
    if test_names:
        return bool(_get_defined_names(block) & {*test_names}), _is_valid(block)
    return _READS_INPUT.search(block) is not None, _is_valid(block)


def _find_blocks(response: str) -> list[tuple[str, str]]:
    """Return (language, text) of the fenced blocks of a reply.

    A block ends at the first fence at which its text is valid Python, because docstrings may contain fences, or else at
    the first fence. The closing fence of the last block may be missing.
    """
    lines, blocks, i, num_ends = response.replace("\r\n", "\n").split("\n"), [], 0, _MAX_ENDS
    while i < len(lines):
        opening = _FENCE.fullmatch(lines[i])
        i += 1
        if opening is None or (opening["lead"] and not opening["tag"].lower().startswith("py")):
            continue
        is_python, fence = opening["tag"].lower().startswith("py"), opening["fence"]
        closing_lines = (k for k in range(i, len(lines)) if lines[k].lstrip().startswith(fence))
        ends = [*islice(closing_lines, num_ends if is_python else 1)] or [len(lines)]
        content = [re.sub(rf"^[ \t]{{0,{len(opening['indent'])}}}", "", line) for line in lines[i : ends[-1]]]
        texts = (textwrap.dedent("\n".join(content[: end - i])) for end in ends)
        number = next((k for k, text in enumerate(texts) if is_python and _is_valid(text)), None)
        num_ends = max(1, num_ends - (len(ends) - 1 if number is None else number))
        end = ends[number or 0]
        blocks.append((opening["tag"], textwrap.dedent("\n".join(content[: end - i])) + "\n"))
        # The end of a block may be missing before the next block.
        closing = _FENCE.fullmatch(lines[end]) if end < len(lines) else None
        i = end if closing is not None and closing["tag"] else end + 1
    return blocks


def _is_valid(text: str) -> bool:
    return _parse(text) is not None


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _get_defined_names(text: str) -> set[str]:
    """Return the names that a program defines; none if the program is invalid."""
    nodes = [*ast.walk(_parse(text) or ast.Module([], []))]
    definitions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imported = {
        (a.asname or a.name).split(".")[0] for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
    }
    return definitions | imported | _get_names(text, ast.Store)


def _get_names(text: str, kind: type[ast.expr_context]) -> set[str]:
    nodes = ast.walk(_parse(text) or ast.Module([], []))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    return {name for name in names if not hasattr(builtins, name)} if kind is ast.Load else names


def find_reference_problems(reference: str) -> list[str]:
    """Return the reasons why the tests of a row cannot verify a program, one line each."""
    try:
        tests = json.loads(reference)
    except ValueError:
        tests = None
    if not isinstance(tests, list) or not tests:
        return ["the answer must be a JSON list of at least one test"]
    errors = []
    for number, test in enumerate(tests, 1):
        if isinstance(test, str):
            errors += [f"test {number} {reason}" for reason in find_problems(test)]
        elif not isinstance(test, dict) or not all(isinstance(test.get(key), str) for key in ("input", "output")):
            errors.append(f'test {number} is neither a text nor {{"input": text, "output": text}}')
    return errors
