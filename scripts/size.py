"""Pure lines of the package (no blanks, comments, docstrings): of the core and of each extension.

python scripts/size.py
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "packaging"))


def pure_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    text = path.read_text(encoding="utf-8")
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        for item in (getattr(node, "body", None) or [] if isinstance(getattr(node, "body", None), list) else [])
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
        for line in range(item.lineno, (item.end_lineno or item.lineno) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for token in tokens if token.type not in silent for n in range(token.start[0], token.end[0] + 1)}
    return len(code - docs)


def main() -> None:
    """Print one line for the core, one for each extension, and their sum."""
    from test_imports import owner

    lines: Counter[str] = Counter()
    for path in (ROOT / "embodyrl").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        lines[owner(module) or "core"] += pure_lines(path)
    for name, count in lines.most_common():
        print(f"{count:6}  {name}")
    print(f"{lines.total():6}  all")


if __name__ == "__main__":
    main()
