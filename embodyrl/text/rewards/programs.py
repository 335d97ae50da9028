"""Programs in replies of a language model, and their tests."""

import ast
import builtins
import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence

from embodyrl.text.sandboxed_tests import problems, program_names

Test = str | Mapping[str, str]
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<lead>.*?)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<tag>\w*)[^`]*")
_STARTS = re.compile(r"(?:import|from|def|class|async)\b|@")
_READS = re.compile(r"\binput\(|\bstdin\b|open\(0")


def find_program(response: str, tests: Sequence[Test]) -> str:
    """Return the program of a reply: of its Python blocks, the last that defines a name of the tests.

    For tests of output, the last block that reads the input is preferred. Earlier blocks that define names which the
    block uses are included. Blocks without a language count only if no block is marked as Python.
    """
    marked = _blocks(response)
    blocks = [text for tag, text in marked if tag.lower().startswith("py")] or [t for tag, t in marked if not tag]
    if not blocks:
        return _without_prose(response)
    wanted = {name for test in tests if isinstance(test, str) for name in program_names(test)}
    chosen = max(range(len(blocks)), key=lambda i: (*_fits(blocks[i], wanted), i))
    program, missing = blocks[chosen], _names(blocks[chosen], ast.Load)
    for block in blocks[chosen - 1 :: -1] if chosen else ():
        if missing & _defined(block) - _defined(program):
            program = f"{block}\n{program}"
            missing |= _names(block, ast.Load)
    return program


def _without_prose(response: str) -> str:
    """Return a reply without blocks, and without text before and after the longest program in it."""
    lines = response.split("\n")
    first = next((i for i, line in enumerate(lines) if _STARTS.match(line)), 0)
    texts = ("\n".join(lines[first:end]) for end in range(len(lines), first, -1))
    return response if _parses(response) else next((text for text in texts if _parses(text)), response)


def _fits(block: str, wanted: Collection[str]) -> tuple[bool, bool]:
    """Return how well a block fits the tests, as a sort key."""
    if wanted:
        return bool(_defined(block) & {*wanted}), _parses(block)
    return _READS.search(block) is not None, _parses(block)


def _blocks(response: str) -> list[tuple[str, str]]:
    """Return (language, text) of the fenced blocks of a reply.

    A block ends at the first fence that leaves valid Python, because docstrings may contain fences, or else at the
    first fence. The last block may lack its end.
    """
    lines, found, i = response.replace("\r\n", "\n").split("\n"), [], 0
    while i < len(lines):
        opened = _FENCE.fullmatch(lines[i])
        i += 1
        if opened is None or (opened["lead"] and not opened["tag"].lower().startswith("py")):
            continue
        indent, fence = len(opened["indent"]), opened["fence"]
        ends = [k for k in range(i, len(lines)) if lines[k].lstrip().startswith(fence)] or [len(lines)]
        texts = ("\n".join(re.sub(rf"^[ \t]{{0,{indent}}}", "", line) for line in lines[i:k]) for k in ends)
        valid = ((k, textwrap.dedent(text)) for k, text in zip(ends, texts, strict=True) if _parses(text))
        first = textwrap.dedent("\n".join(lines[i : ends[0]]))
        end, text = next(valid, (ends[0], first)) if opened["tag"].lower().startswith("py") else (ends[0], first)
        found.append((opened["tag"], text + "\n"))
        # The end of a block may be missing before the next block.
        ended = _FENCE.fullmatch(lines[end]) if end < len(lines) else None
        i = end if ended is not None and ended["tag"] else end + 1
    return found


def _parses(text: str) -> bool:
    return _tree(text) is not None


def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined(text: str) -> set[str]:
    """Return the names that a program defines; none if the program is invalid."""
    nodes = [*ast.walk(_tree(text) or ast.Module([], []))]
    named = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imported = {
        (a.asname or a.name).split(".")[0] for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
    }
    return named | imported | _names(text, ast.Store)


def _names(text: str, kind: type[ast.expr_context]) -> set[str]:
    nodes = ast.walk(_tree(text) or ast.Module([], []))
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    return {name for name in found if not hasattr(builtins, name)} if kind is ast.Load else found


def reference_problems(reference: str) -> list[str]:
    """Return the reasons why the tests of a row cannot verify a program, one line each."""
    try:
        tests = json.loads(reference)
    except ValueError:
        tests = None
    if not isinstance(tests, list) or not tests:
        return ["the answer must be a JSON list of at least one test"]
    found = []
    for number, test in enumerate(tests, 1):
        if isinstance(test, str):
            found += [f"test {number} {why}" for why in problems(test)]
        elif not isinstance(test, dict) or not all(isinstance(test.get(key), str) for key in ("input", "output")):
            found.append(f'test {number} is neither a text nor {{"input": text, "output": text}}')
    return found
