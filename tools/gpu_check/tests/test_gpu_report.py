"""`embodyrl-gpu-check`: each check runs or names the reason, and none stops the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from embodyrl_gpu_check import command, host, links, listing, presets, speed
from embodyrl_gpu_check.checks import GpuCheck
from embodyrl_gpu_check.command import main
from embodyrl_gpu_check.result import GpuParts
from gpu_host import H100, stub_nvidia_smi

from embodyrl.plan.rates import read_measured_rates

CHECKS = """
import os, signal, time
from embodyrl.errors import MissingDependencyError
from embodyrl_gpu_check.result import GpuParts

def hang():
    print("before the wait", flush=True)
    time.sleep(600)

def crash():
    raise ValueError("a broken driver")

def die():
    os.kill(os.getpid(), signal.SIGSEGV)

def lack():
    raise MissingDependencyError("no assets")

def partly():
    parts = GpuParts()
    with parts.part("first"):
        raise ValueError("odd")
    with parts.part("second"):
        parts.record("rate", 3)
        parts.measured["Some GPU"] = {"flops": 2.0}
    return parts.result("second works")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report_of(folder: Path) -> dict[str, dict]:
    return {entry["name"]: entry for entry in json.loads((folder / "gpu_report.json").read_text())["checks"]}


@pytest.mark.integration
def test_failing_check_is_reported_and_later_checks_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken_checks.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(folder)
    checks: dict[str, GpuCheck] = {}
    for name in ("hang", "crash", "die", "lack", "partly"):
        timeout = 5.0 if name == "hang" else 60.0
        function = f"broken_checks:{name}"
        checks[name] = GpuCheck(title=name, function=function, timeout_s=timeout, needs_gpu=False)
    checks["absent"] = GpuCheck(title="", function="x:y", timeout_s=1, needs_gpu=False, needs=("no_such",))
    monkeypatch.setattr(command, "CHECKS", checks)
    assert main([]) == 3
    found = report_of(folder)
    assert [*found] == ["hang", "crash", "die", "lack", "partly", "absent"]
    assert [one["level"] for one in found.values()] == ["FAIL", "FAIL", "FAIL", "skip", "FAIL", "skip"]
    assert found["hang"]["text"] == "no response within 5 s"
    assert "before the wait" in found["hang"]["log"]
    assert found["crash"]["text"] == "ValueError: a broken driver"
    assert found["die"]["text"] == "killed by SIGSEGV"
    assert found["partly"]["text"] == "first: ValueError: odd; second works"
    assert found["partly"]["values"]["rate"] == 3
    assert found["absent"]["text"] == "no_such is not installed"
    page = (folder / "gpu_report.md").read_text()
    assert all(text in page for text in ("killed by SIGSEGV", "before the wait", "rate: 3", "ValueError: odd"))
    assert read_measured_rates()["Some GPU"].rates == {"flops": 2.0}


def test_checks_without_a_gpu_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["devices", "speed", "drawing", "host", "links"]
    assert main([*names, "--json"]) == 0
    found = report_of(folder)
    assert json.loads(capsys.readouterr().out)["checks"] == [*found.values()]
    assert [*found] == names
    assert {name: one["level"] for name, one in found.items()} == dict.fromkeys(names, "skip") | {"host": "ok"}
    assert found["speed"]["text"] == "no GPU is visible"
    assert found["host"]["values"]["control groups"]


@pytest.mark.integration
def test_parent_process_does_not_import_torch(folder: Path) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path}; from embodyrl_gpu_check.command import main; main(['host']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_torch_that_cannot_use_the_gpu_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_nvidia_smi(folder, monkeypatch, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = listing.check_devices()
    assert result.level == "FAIL"
    assert "cannot use 1 GPUs" in result.text
    assert "TORCH_BUILD=cuda" in result.fix
    assert result.values["nvidia-smi"] == [f"0 GPU-a {H100[-1]}"]


@pytest.mark.parametrize(
    ("typed", "problem"), [(["sped"], "there is no check 'sped'"), (["--out", "a.md"], "a name that ends in .json")]
)
def test_wrong_arguments_are_rejected(typed: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(typed)
    assert problem in capsys.readouterr().err


@pytest.mark.integration
def test_speed_check_measures_a_device() -> None:
    parts = GpuParts()
    assert "AdamW resumes from a CPU checkpoint" in speed.measure_device(parts, "cpu", "processor")
    assert parts.failures == []
    assert parts.measured["processor"].keys() == {"flops", "slow_flops", "bandwidth"}
    assert min(parts.measured["processor"].values()) > 0


@pytest.mark.integration
def test_collectives_run_in_a_process_for_each_gpu() -> None:
    parts = GpuParts()
    links.measure_links(parts, ("0", "1"), "gloo", 400_000)
    assert set(parts.values["GB/s of each GPU"]) == {"all-gather", "reduce-scatter"}


@pytest.mark.integration
def test_failed_rank_is_reported_with_its_log() -> None:
    with pytest.raises(RuntimeError, match="no_backend"):
        links.measure_links(GpuParts(), ("0", "1"), "no_backend", 400_000)


@pytest.mark.sim
@pytest.mark.integration
def test_presets_that_fit_are_listed_with_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_nvidia_smi(folder, monkeypatch, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("embodyrl.plan.memory_limits.available_bytes", lambda: 2**40)
    names = ("libero_10_lora_24gb", "libero_10_full_8gpu")
    monkeypatch.setattr(presets, "PRESETS", {name: presets.PRESETS[name] for name in names})
    result = presets.check_presets()
    assert result.level == "ok"
    assert re.fullmatch(r"17\.\d GiB for the policy, about \d+ s a step", result.values["libero_10_lora_24gb"])
    assert "actor.fsdp.size=8" in result.values["libero_10_full_8gpu"], "one GPU"
    assert result.text.startswith("fits: libero_10_lora_24gb (17.")
    assert result.text.endswith("; does not fit as it is: libero_10_full_8gpu")


def test_host_check_reads_cgroup_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = folder / "cgroup"
    (group / "job").mkdir(parents=True)
    (group / "job" / "memory.max").write_text("8589934592\n")
    (group / "memory.max").write_text("max\n")
    (folder / "membership").write_text("0::/job\n")
    monkeypatch.setattr("embodyrl.files.CGROUP", group)
    monkeypatch.setattr("embodyrl.files.MEMBERSHIP", folder / "membership")
    assert host.cgroup_limits() == {f"{group}/job/memory.max": "8589934592", f"{group}/memory.max": "max"}


def test_gpu_on_a_node_without_usable_cores_gives_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_nvidia_smi(folder, monkeypatch, ("0", "00000000:18:00.0"))
    (folder / "0000:18:00.0").mkdir()
    (folder / "0000:18:00.0" / "numa_node").write_text("1\n")
    for node, cores in ((0, "0-4095"), (1, "5000-5003")):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(host, "_PCI", folder)
    monkeypatch.setattr(host, "_NODES", folder)
    result = host.check_host()
    assert result.level == "warn"
    assert "GPU 0 is on NUMA node 1" in result.text
    assert result.values["cores of NUMA nodes"][0] == len(os.sched_getaffinity(0))
