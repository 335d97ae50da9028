"""Doctor reports facts of this machine and fails where something is really broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.cli import probes
from embodyrl.cli.rendering import probe_rendering, probe_video

DOCTOR = [sys.executable, "-m", "embodyrl.cli.main", "doctor", "--json"]


def test_report_as_json_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = subprocess.run(DOCTOR, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    levels = {f["name"]: f["level"] for f in report["findings"]}
    assert {"python", "torch", "memory", "/dev/shm", "ulimit -n", "rendering", "video", "packages"} <= set(levels)
    assert levels["folder runs"] == "FAIL"
    assert levels["folder videos"] in ("ok", "warn")
    assert done.returncode == 3
    assert report["failed"] == sum(level == "FAIL" for level in [f["level"] for f in report["findings"]])
    assert all(f["fix"] for f in report["findings"] if f["level"] != "ok")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_wrong_override_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run([*DOCTOR, "env=libero_11"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "libero_10" in done.stderr


def test_a_frame_is_really_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    finding = probe_rendering()
    assert finding.level == "ok", finding
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    finding = probe_rendering()
    assert finding.level == "FAIL"
    assert "osmesa" in finding.fix


def test_video_encoder_starts() -> None:
    assert probe_video().level == "ok"


def test_stale_segments_are_those_of_dead_owners(tmp_path: Path) -> None:
    me, uid = os.getpid(), os.getuid()
    start = probes._start_time(me)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alive = f"embodyrl-{uid}-{me}-{start}-0"
    stale = [f"embodyrl-{uid}-{gone.pid}-1-0", f"embodyrl-{uid}-{me}-1-3"]
    foreign = [f"embodyrl-{uid + 1}-{gone.pid}-1-0", "embodyrl-notes", "psm_1234"]
    for name in (alive, *stale, *foreign):
        (tmp_path / name).write_bytes(b"x")
    assert sorted(p.name for p in probes.stale_segments(tmp_path)) == sorted(stale)


def test_clean_removes_stale_segments_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / f"embodyrl-{os.getuid()}-{os.getpid()}-1-0"
    other = tmp_path / "psm_1234"
    stale.write_bytes(b"x")
    other.write_bytes(b"x")
    monkeypatch.setattr(probes, "SHM", tmp_path)
    assert probes.probe_stale_segments(clean=False).level == "warn"
    assert stale.exists()
    assert probes.probe_stale_segments(clean=True).text.startswith("removed 1")
    assert not stale.exists()
    assert other.exists()


def test_missing_extra_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=1.0", "numpy>=999; extra == 'future'", "no-such-package-xyz; extra == 'gone'"]
    monkeypatch.setattr(probes.metadata, "requires", lambda name: wanted)
    by_name = {f.name: f for f in probes.probe_extras()}
    assert by_name["packages"].level == "ok"
    assert by_name["extra future"].level == "warn"
    assert ">=999" in by_name["extra future"].text
    assert "no-such-package-xyz is missing" in by_name["extra gone"].text
    assert by_name["extra gone"].fix == "pip install 'embodyrl[gone]'"
