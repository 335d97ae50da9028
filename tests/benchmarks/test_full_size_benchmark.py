"""The benchmark of whole jobs writes checkpoints in the public layouts and runs all its parts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.policies.vla.folder import RANDOM_INIT_KEY

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.sim]
FAST = ("launcher.env_workers=1", "env.render_profile=lean")


def run(tmp_path: Path, *words: str) -> dict[str, dict]:
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/full_size.py", "--json", str(out), "--folder", str(tmp_path / "job")]
    subprocess.run([*command, "--size", "tiny", *words, "--set", *FAST], check=True, cwd=ROOT, timeout=600)
    parts = {row["part"]: row for row in json.loads(out.read_text())["parts"]}
    assert all(row["exit"] == 0 and row["seconds"] > 0 for row in parts.values())
    return parts


@pytest.mark.parametrize("model", ["openvla_oft", "smolvla", "pi05"])
@pytest.mark.parametrize("size", ["full", "tiny"])
def test_saved_weights_are_loaded_instead_of_generated(tmp_path: Path, model: str, size: str) -> None:
    spec = importlib.util.spec_from_file_location("random_weights", ROOT / "benchmarks" / "random_weights.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = sys.modules["random_weights"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.write_side_files(tmp_path, model, size)
    assert RANDOM_INIT_KEY not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_openvla_oft_trains_resumes_exports_and_evaluates(tmp_path: Path) -> None:
    pytest.importorskip("libero")
    parts = run(tmp_path, "--envs", "2", "--chunks", "1")
    assert list(parts) == ["write", "plan", "train", "resume", "export", "eval"]
    for step, part in enumerate(("train", "resume"), start=1):
        assert parts[part]["metrics"]["step"] == step
        assert parts[part]["metrics"]["actor/optimizer_steps"] > 0
        assert parts[part]["processes_gib"]["embodyrl:policy"] > 0
    assert any("GiB for each of 1 policy processes" in line for line in parts["plan"]["tail"])
    assert len(list((tmp_path / "job" / "checkpoint").glob("model-*.safetensors"))) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["smolvla", "pi05"])
def test_flow_models_are_evaluated_from_their_published_layout(tmp_path: Path, model: str) -> None:
    pytest.importorskip("libero")
    assert list(run(tmp_path, "--model", model, "--chunks", "1")) == ["write", "plan", "eval"]
