"""Plain English in docstrings, comments, messages, help lines, test names and commit subjects (words.toml)."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
BANNED = re.compile(r"(?<![\w.`'\"-])(?:" + "|".join(WORDS["banned"]) + r")(?![\w`'\"=(:-])", re.IGNORECASE)
NOT_FIRST, VERBS = {*WORDS["not_first"]}, {*WORDS["verbs"].split()}
MAX_SENTENCE_WORDS, MAX_ERROR_SENTENCES, MAX_HELP, MAX_TEST_NAME, MAX_SUBJECT = 25, 3, 110, 90, 72
ERRORS = re.compile(r"(Error|Closed|Timeout|Lost|Interrupted)$")


@dataclass(frozen=True)
class Text:
    """A text of the project with its kind: function, class, property, key, comment, message, error, help or test."""

    file: str
    kind: str
    words: str

    @property
    def first(self) -> str:
        """Return the first word in lower case."""
        return re.split(r"[\s,:;.]", self.words.strip(), maxsplit=1)[0].lower()


def sentences(text: str) -> list[str]:
    """Split a text at full stops that end a sentence."""
    return [part for part in re.split(r"(?<=[a-z0-9)`'\"}\]][.!?])\s+(?=[A-Z`'\"\[(])", text.strip()) if part]


def problems(text: Text) -> Iterator[str]:
    """Yield the rules that a text breaks."""
    plain = re.sub(r"``.*?``|`[^`]*`", "X", text.words)
    for match in BANNED.finditer(plain.replace("_", " ") if text.kind == "test" else plain):
        if match[0] == "FiLM":  # feature-wise linear modulation
            continue
        yield f"word '{match[0].lower()}'"
    if text.kind in ("function", "class", "property", "key", "help") and text.first in NOT_FIRST:
        yield f"begins with '{text.first}'"
    if text.kind == "function" and text.first not in VERBS:
        yield "begins with no imperative verb"
    if text.kind in ("function", "class", "property"):
        line = text.words.strip().splitlines()[0]
        if not line.endswith((".", ":", "?", "!")):
            yield "first sentence is longer than a line"
        if len(line.split()) > MAX_SENTENCE_WORDS + 5:
            yield "first line is too long"
    if text.kind == "error" and len(sentences(text.words)) > MAX_ERROR_SENTENCES:
        yield "more than three sentences"
    if text.kind == "help" and len(text.words) > MAX_HELP:
        yield "help line is too long"
    if text.kind == "test" and len(text.words) > MAX_TEST_NAME:
        yield "test name is too long"


def _literal(node: ast.AST) -> str:
    """Return the text of a string expression with a placeholder for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(v) if isinstance(v, ast.Constant) else "X" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ""


def _documented(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    """Yield all docstrings with the kind of what they describe; private functions count as comments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            value = statement.value
            if not isinstance(value.value, str):
                continue
            if isinstance(before, ast.AnnAssign | ast.Assign):
                yield "key", value
            elif before is not None:
                yield "comment", value
            elif isinstance(node, ast.ClassDef):
                yield "class", value
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
                if node.name.startswith("_"):
                    yield "comment", value
                else:
                    yield "property" if "property" in decorators else "function", value
            else:
                yield "module", value


def texts_of(source: str, file: str) -> Iterator[Text]:
    """Yield docstrings, key descriptions, comments, messages and errors of a Python file."""
    tree = ast.parse(source)
    seen: set[int] = set()
    for kind, node in _documented(tree):
        seen.add(id(node))
        yield Text(file, kind, str(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ERRORS.search(ast.unparse(node.func)):
            for argument in node.args:
                if literal := _literal(argument):
                    seen |= {id(part) for part in ast.walk(argument)}
                    yield Text(file, "error", literal)
    for node in ast.walk(tree):
        if id(node) not in seen and isinstance(node, ast.BinOp | ast.JoinedStr | ast.Constant):
            literal = _literal(node)
            seen |= {id(part) for part in ast.walk(node)}
            if len(literal.split()) >= 4:
                yield Text(file, "message", literal)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(file, "comment", token.string.lstrip("# "))


def help_lines() -> Iterator[Text]:
    """Yield the help lines of commands and flags."""
    for path in sorted((ROOT / "embodyrl").rglob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        stack: list[object] = [table]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                for key in ("help", "summary"):
                    if isinstance(value.get(key), str):
                        yield Text(str(path.relative_to(ROOT)), "help", value[key])
                stack += value.values()
            elif isinstance(value, list):
                stack += value


@cache
def all_texts() -> tuple[Text, ...]:
    """Return every text that the rules apply to."""
    found = [*help_lines()]
    for path in sorted((ROOT / "embodyrl").rglob("*.py")):
        found += texts_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found += [
            Text(str(path.relative_to(ROOT)), "test", node.name)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        ]
    return tuple(found)


def allowed(text: Text) -> bool:
    return any(text.file.endswith(use["file"]) and use["text"] in text.words for use in WORDS["allowed"])


def faults() -> list[str]:
    """Return one line per broken rule."""
    return [
        f"{text.file}: {text.kind}: {' '.join(text.words.split())[:100]} [{problem}]"
        for text in all_texts()
        if not allowed(text)
        for problem in problems(text)
    ]


def test_texts_use_no_discouraged_words():
    assert faults() == [], "rewrite these by tests/packaging/words.toml"


def test_word_list_exceptions_are_used():
    unused = [
        use
        for use in WORDS["allowed"]
        if not any(t.file.endswith(use["file"]) and use["text"] in t.words for t in all_texts())
    ]
    assert unused == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("function", "Where the file is."),
        ("function", "Returns the advantages."),
        ("function", "Return the advantages of each group and a great number of other things that do not fit"),
        ("class", "What a run needs."),
        ("key", "Whether weights are frozen."),
        ("key", "Episodes of which nobody takes note."),
        ("comment", "as many as fit"),
        ("error", "A is wrong. B is wrong. C is wrong. Do D."),
        ("message", "the env was told to stop"),
        ("error", "The file is no checkpoint."),
        ("message", "the next chunk replaces the last one"),
        ("help", "how many checkpoints stay"),
        ("test", "test_it_lies_apart"),
    ],
)
def test_discouraged_words_are_detected(kind, words):
    assert [*problems(Text("a.py", kind, words))]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("function", "Return the advantages of each group.\n\nShapes are [N]."),
        ("property", "Number of environments."),
        ("key", "Learning rate."),
        ("error", "env.name=foo is unknown (line 3.1). Choose one of a, b. See `embodyrl list envs`."),
        ("test", "test_greedy_action_is_batch_independent"),
        ("comment", "the key `told` of the file"),
        ("error", "There is no checkpoint."),
    ],
)
def test_plain_words_are_accepted(kind, words):
    assert [*problems(Text("a.py", kind, words))] == []


def subject_problem(subject: str) -> str | None:
    """Return the reason why a commit subject is rejected; None: accepted."""
    first = re.split(r"\W", subject, maxsplit=1)[0].lower()
    if len(subject) > MAX_SUBJECT:
        return f"longer than {MAX_SUBJECT} characters"
    if subject.endswith("."):
        return "ends with a full stop"
    if first in WORDS["not_imperative"] or (re.search(r"(?<!ee)ed$|(?<!r)ing$", first) and first not in VERBS):
        return f"'{first}' is no imperative verb"
    if re.search(r"[^s]s$", first) and first not in ("focus", "bias", "canvas"):
        return f"'{first}' is no imperative verb"
    return None if subject[:1].isupper() else "begins with no capital letter"


@pytest.mark.parametrize(
    "subject",
    [
        "Fixed the loader", "Adds a loss", "Testing the arena", "A planted bug", "Robots are taught alike", "Fix it.",
        "What ckpt= brings along", "fix the loader", "Fix " + "x" * 72,
    ],
)  # fmt: skip
def test_invalid_commit_subjects_are_detected(subject):
    assert subject_problem(subject)


@pytest.mark.parametrize("subject", ["Fix time-limit bootstrapping in vector envs", "Pass seeds", "Bring back eval"])
def test_valid_commit_subjects_are_accepted(subject):
    assert subject_problem(subject) is None


def test_new_commit_subjects_are_imperative():
    for origin in ("origin/main", "origin"):
        command = ["git", "log", "--no-merges", "--format=%s", f"{origin}..HEAD"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            subjects = listed.stdout.splitlines()
            assert [f"{s}: {why}" for s in subjects if (why := subject_problem(s))] == []
            return
    pytest.skip("no git checkout with an origin to compare with")


def lines_without_heading(docstring: str) -> list[str]:
    """Return the indented lines outside the sections, lists and examples of a docstring."""
    found, before = [], ""
    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("    ") and not before.startswith(("    ", "*", "-", ">>>")) and not before.endswith(":"):
            found.append(line.strip())
        before = line or before
    return found


@pytest.mark.parametrize("lost", [True, False])
def test_indented_lines_without_a_heading_are_detected(lost: bool):
    heading = "net: a module." if lost else "Args:"
    docstring = f"Load weights.\n\n    {heading}\n        net: a module.\n        folder: a folder.\n"
    assert lines_without_heading(docstring) == (["net: a module."] if lost else [])


def test_sections_of_docstrings_have_headings():
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    wrong = []
    for folder in ("embodyrl", "tools", "benchmarks", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
            for node in nodes:
                lines = lines_without_heading(ast.get_docstring(node) or "")
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {line}" for line in lines]
    assert wrong == []
