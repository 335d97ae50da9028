"""Size of the core and of each extension: pure lines (no blanks, comments, docstrings), classes, settings, keys.

python scripts/size.py
"""

import ast
import inspect
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "packaging")]


def pure_lines(path: Path) -> int:
    """Count the lines of a file that contain code."""
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


def classes(path: Path) -> list[ast.ClassDef]:
    """Return the classes of a file."""
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]


def holds_settings(kind: ast.ClassDef) -> bool:
    """Return True for a class that extends a settings class or a command's config."""
    return any(ast.unparse(base).partition("[")[0].endswith(("Settings", "Section", "Config")) for base in kind.bases)


def key_modules() -> list[str]:
    """Return the module that declares each config key, over all commands and components."""
    from embodyrl.plan.keys import all_keys

    found = []
    for name, key in all_keys().items():
        field = name.rpartition(".")[2]
        declaring = (kind for kind in key.owner.__mro__ if field in inspect.get_annotations(kind))
        found.append(next(declaring, key.owner).__module__)
    return found


def main() -> None:
    """Print one line for the core, one for each extension, and their sum."""
    from test_imports import owner

    columns: dict[str, Counter[str]] = {name: Counter() for name in ("lines", "classes", "settings", "keys")}
    for path in (ROOT / "embodyrl").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        name, found = owner(module) or "core", classes(path)
        columns["lines"][name] += pure_lines(path)
        columns["classes"][name] += len(found)
        columns["settings"][name] += sum(map(holds_settings, found))
    columns["keys"].update(owner(module) or "core" for module in key_modules())
    print("".join(f"{title:>9}" for title in columns))
    for name, _ in columns["lines"].most_common():
        print("".join(f"{column[name]:9}" for column in columns.values()), "", name)
    print("".join(f"{column.total():9}" for column in columns.values()), " all")


if __name__ == "__main__":
    main()
