"""Apply mutants one at a time in a copy of the tree and report those that the named tests do not detect.

    python tests/mutants/run.py [--only TEXT] [--out FILE] [--unchanged]

Each mutant is an entry of planted/<folder of the package, or part of it>.toml (combinations.toml and pairs.toml: bugs
that are visible only if two options or parts are combined): a file, old text that occurs in it
once, new text, and tests that must fail.
Libraries are loaded once; every mutant runs in a separate process. `--unchanged` runs the same tests without any
mutant: they must pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PARTS = ("embodyrl", "conf", "tests", "examples", "pyproject.toml")
CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"
BROKEN_CODE = 90
"""Exit code of a process that could not run its tests."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str | None = None
    """A package that the tests need; if it is not installed, the mutant is skipped."""

    @property
    def can_run(self) -> bool:
        """Return whether the tests of a mutant can run here."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def read_mutants() -> list[Mutant]:
    """Return all entries of planted/, by file."""
    files = sorted(Path(__file__).with_name("planted").glob("*.toml"))
    raw = [entry for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in raw]


def copy_tree(target: Path) -> Path:
    """Copy the files that tests need, with their bytecode; included weights are linked."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("golden"))
        else:
            shutil.copy(source, target / part)
    for part in ("assets", "tests/golden"):
        os.symlink(ROOT / part, target / part)
    return target


def judge(tree: Path, mutant: Mutant, *, planted: bool, log: Path) -> str:
    """Run the tests of a mutant with or without it; return the verdict."""
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return BROKEN
    try:
        if planted:
            file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        code = _run_tests(tree, mutant.tests, log)
    finally:
        file.write_text(text, encoding="utf-8")
    if code not in (0, 1):
        return BROKEN
    return SURVIVED if code == 0 else CAUGHT


def _run_tests(tree: Path, tests: Sequence[str], log: Path) -> int:
    """Return the exit code of pytest in a forked process that imports the package from `tree`."""
    child = os.fork()
    if child == 0:
        code = BROKEN_CODE
        try:
            os.chdir(tree)
            os.environ["PYTHONPATH"] = str(tree)
            sys.dont_write_bytecode = True
            sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
            for name in [name for name in sys.modules if name.partition(".")[0] == "embodyrl"]:
                del sys.modules[name]
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            import pytest

            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(tree), *tests]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(words: Sequence[str]) -> int:
    """Run the selected mutants; return 1 if a mutant survives or is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="those with this text in name or file")
    parser.add_argument("--out", type=Path, help="write a JSON line per mutant")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without any mutant")
    args = parser.parse_args(words)
    chosen = [m for m in read_mutants() if m.can_run and (args.only in m.name or args.only in m.file)]
    import numpy  # noqa: F401  (loaded once, before the forks)
    import pytest  # noqa: F401
    import torch  # noqa: F401

    verdicts = []
    with tempfile.TemporaryDirectory(prefix="embodyrl-mutants-") as folder:
        tree = copy_tree(Path(folder))
        for mutant in chosen:
            started = time.perf_counter()
            verdict = judge(tree, mutant, planted=not args.unchanged, log=Path(folder) / "log")
            verdicts.append(verdict)
            seconds = time.perf_counter() - started
            sys.stdout.write(f"{verdict:9} {seconds:6.1f} s  {mutant.name}  ({mutant.file})\n")
            sys.stdout.flush()
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"name": mutant.name, "file": mutant.file, "verdict": verdict}) + "\n")
    good = SURVIVED if args.unchanged else CAUGHT
    sys.stdout.write(f"{verdicts.count(good)} of {len(verdicts)} {'pass unchanged' if args.unchanged else 'caught'}\n")
    return 0 if verdicts and verdicts.count(good) == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
