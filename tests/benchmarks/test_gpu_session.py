"""The GPU session continues after a part that fails and after its time limit, and writes a row for each part."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def run_session(out: Path, *parts: str, total_s: int = 840) -> tuple[int, list[tuple[str, int]]]:
    """Return the exit code of a session, and the name and exit code of each part."""
    environ = os.environ | {"SIZE": "tiny", "TOTAL_S": str(total_s)}
    command = ["bash", "benchmarks/gpu_session.sh", str(out), *parts]
    done = subprocess.run(command, cwd=ROOT, env=environ, check=False, timeout=600)
    rows = [json.loads(line) for line in (out / "session.jsonl").read_text().splitlines()]
    return done.returncode, [(row["part"], row["exit"]) for row in rows]


@pytest.mark.timeout(600)
def test_gpu_session_continues_after_a_failed_part(tmp_path):
    (tmp_path / "gpu_report.json").mkdir()  # the report of the part `check` cannot be written
    assert run_session(tmp_path, "check", "vllm") == (1, [("check", 1), ("vllm", 0)])
    assert "gpu_report.json" in (tmp_path / "check.log").read_text()
    assert (tmp_path / "vllm_report.json").is_file()


def test_gpu_session_ends_a_part_at_the_time_limit(tmp_path):
    code, rows = run_session(tmp_path, "vllm", "tests", total_s=1)
    assert (code, rows) == (1, [("vllm", 124), ("tests", 124)])
    assert not (tmp_path / "tests.log").exists(), "no time was left"
