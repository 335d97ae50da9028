"""The overlap benchmark runs each schedule, and rejects sizes that it cannot measure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SOURCE, command_environment

pytestmark = [pytest.mark.integration]


def run_overlap(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SOURCE / "benchmarks" / "overlap.py"), *words],
        cwd=folder,
        env=command_environment(folder),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_overlap_benchmark_measures_each_schedule(tmp_path: Path) -> None:
    done = run_overlap(tmp_path, "--workers", "2", "--sim", "0.005", "--chunks", "12", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["what"] for row in rows[:4]] == ["1 stages", "2 stages", "4 stages", "2 stages"]
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)


@pytest.mark.parametrize("words", [("--chunks", "8"), ("--sim", "0"), ("--workers", "0")])
def test_overlap_benchmark_rejects_too_few_chunks(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run_overlap(tmp_path, *words)
    assert done.returncode == 2
    assert "--chunks of at least 12" in done.stderr
