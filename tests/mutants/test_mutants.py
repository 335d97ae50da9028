"""Each mutant makes its named tests fail (slow: runs all mutants in sequence)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run import ROOT, read_mutants

MUTANTS = read_mutants()


def test_every_mutant_applies():
    """Old text occurs once in its file, differs from the new text, and every named test exists."""
    assert len(MUTANTS) >= 60
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.name
        assert mutant.new != mutant.old, mutant.name
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), (mutant.name, test)


def test_every_folder_has_mutants():
    rooms = {m.file.split("/")[1] for m in MUTANTS}
    wanted = {
        "algorithms",
        "workers",
        "channels",
        "policies",
        "envs",
        "text",
        "data",
        "learners",
        "plan",
        "commands",
        "monitor",
    }
    assert wanted | {"checkpoint", "scheduler", "config"} <= rooms


@pytest.mark.integration
def test_runner_imports_the_package_with_the_mutant(tmp_path):
    """Not the package that the runner itself has imported."""
    out = tmp_path / "verdicts.jsonl"
    words = ["--only", "GRPO forgets to center", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/mutants/run.py"), *words], check=False, timeout=300, capture_output=True
    )
    assert "caught" in out.read_text(), done.stdout
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_each_mutant_fails_its_tests(tmp_path):
    """At least 95 % of the mutants."""
    out = tmp_path / "verdicts.jsonl"
    subprocess.run([sys.executable, str(ROOT / "tests/mutants/run.py"), "--out", str(out)], check=False, timeout=14000)
    verdicts = [line.split('"verdict": "')[1].split('"')[0] for line in out.read_text().splitlines()]
    assert len(verdicts) == sum(mutant.can_run for mutant in MUTANTS)
    assert verdicts.count("caught") >= 0.95 * len(verdicts), out.read_text()
