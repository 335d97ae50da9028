"""The policy benchmarks run and write the documented JSON fields."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {"what", "unit", "ours", "against", "theirs", "ratio", "goal"}


def run(tmp_path, script, *words):
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, f"benchmarks/{script}", "--json", str(out), *words], check=True, cwd=ROOT)
    content = json.loads(out.read_text())
    assert all(row.keys() == KEYS and row["ratio"] > 0 for row in content["rows"])
    assert content["machine"]["device"]
    return [row["what"] for row in content["rows"]]


@pytest.mark.slow
def test_gpu_benchmark_runs_on_a_cpu(tmp_path):
    small = ("--batches", "1", "--micro-batch", "1", "--global-batch", "2", "--seconds", "0", "--dtype", "fp32")
    names = run(tmp_path, "gpu.py", "--size", "tiny", "--device", "cpu", *small)
    for mode in ("lora", "full"):
        for what in ("act batch 1", "latency batch 1", "train micro-batch 1", "train peak memory"):
            assert f"tiny fp32 {mode} {what}" in names


@pytest.mark.integration
def test_policy_benchmark_compares_with_a_reference_implementation(tmp_path):
    pytest.importorskip("timm", reason="the peer is built from timm", exc_type=Exception)
    pytest.importorskip("transformers", reason="the peer is built from transformers")
    names = run(tmp_path, "policy.py", "--sizes", "tiny", "--batches", "1", "--seconds", "0", "--turns", "1")
    assert names == [f"tiny fp32 {what} batch 1" for what in ("act", "act", "score", "score")]


@pytest.mark.slow
@pytest.mark.integration
def test_flow_benchmark_compares_with_reference_implementations(tmp_path, capfd):
    names = run(tmp_path, "policy.py", "--sizes", "pi0-tiny", "--batches", "2", "--seconds", "0", "--turns", "1")
    assert names == [f"pi0-tiny fp32 {what} batch 2" for what in ("act", "act", "score", "score", "act", "act")]
    differences = [float(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if "differ" in line]
    assert len(differences) == 2
    assert max(differences) < 1e-3


@pytest.mark.slow
def test_text_benchmark_runs(tmp_path):
    text = runpy.run_path(str(ROOT / "benchmarks" / "text.py"))
    model, data = text["prepare"](tmp_path, "short")
    steps = text["measure"](text["OURS"], "hf", 4, model, data, tmp_path / "out")
    assert len(steps) == text["STEPS"] - 1
    assert all(seconds > 0 and 64 <= tokens <= 4 * 64 for seconds, tokens in steps)
