"""Comparison of two checkouts on `experiment=libero_laptop`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_checkouts_of_the_laptop_benchmark_compute_equal_results(tmp_path):
    pytest.importorskip("libero")
    command = [sys.executable, "benchmarks/laptop.py", "--other", str(ROOT), "--chunks", "2", "--updates", "2"]
    command += ["--json", str(tmp_path / "laptop.json")]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=280)
    assert done.stdout.startswith("same images and actions in 4 of 4 pairs, other numbers differ by 0.0e+00")
    rows = json.loads((tmp_path / "laptop.json").read_text())["rows"]
    assert [row["part"] for row in rows] == ["simulate", "render", "simulate and render", "act", "update"]
    assert all(row["this_ms"] > 0 for row in rows)
