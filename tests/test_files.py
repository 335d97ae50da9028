"""Available cores and memory under quotas, and file output."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from embodyrl import files

ALL = len(os.sched_getaffinity(0))
QUOTAS = {
    "none": ("0::/\n", {"cpu.max": "max 100000"}, ALL),
    "v2, one and a half cores": ("0::/\n", {"cpu.max": "150000 100000"}, min(ALL, 2)),
    "v2, of a group above": ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
    "v1": (
        "3:cpu,cpuacct:/job\n1:memory:/x\n0::/\n",
        {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"},
        1,
    ),
    "v1, unlimited": ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, ALL),
    "other controllers": ("3:cpuset:/\n", {"cpu.max": "100000 100000"}, ALL),
}


def nested(path: Path) -> None:
    path.write_text("[" * 200_000 + "]" * 200_000)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (nested, ValueError, "nested too deeply"),
        (sparse, ValueError, "expected at most 67108864"),
        (os.mkfifo, OSError, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), OSError, "not a regular file"),
        (lambda path: path.write_text("{"), ValueError, "Expecting property name"),
        (lambda path: None, FileNotFoundError, "No such file"),
    ],
    ids=["nested", "sparse", "pipe", "device", "truncated", "missing"],
)
def test_malformed_or_oversized_json_file_is_an_error(tmp_path: Path, make, kind, said) -> None:
    make(tmp_path / "a.json")
    with pytest.raises(kind, match=said):
        files.read_json(tmp_path / "a.json")


def test_json_file_behind_a_symlink_is_read(tmp_path: Path) -> None:
    """Caches of model hubs link to their files."""
    (tmp_path / "blob").write_text('{"a": [1, "é"]}', encoding="utf-8")
    (tmp_path / "a.json").symlink_to(tmp_path / "blob")
    assert files.read_json(tmp_path / "a.json") == {"a": [1, "é"]}


def test_size_limited_log_keeps_its_end(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    files.cap_log(log)
    with log.open("ab") as writer:
        writer.write(b"x" * (16 << 20))
        writer.flush()
        files.cap_log(log)
        assert log.stat().st_size == 16 << 20
        writer.write(b"the end")
        writer.flush()
        files.cap_log(log)
        writer.write(b", and on")
    data = log.read_bytes()
    assert (1 << 20) < len(data) < (1 << 20) + 100
    assert data.startswith(b"... 15728647 bytes were dropped here\n")
    assert data.endswith(b"xthe end, and on")


@pytest.mark.parametrize("case", QUOTAS)
def test_available_cores_follow_quotas(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership, written, expected = QUOTAS[case]
    lay_out(tmp_path, {"membership": membership, **written})
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    monkeypatch.setattr(files, "MEMBERSHIP", tmp_path / "membership")
    assert files.available_cores() == expected


LIMITS = {
    "a container": ("0::/", "", {"max": 100, "current": 90}, 10),
    "a job of Slurm": ("0::/system.slice/job_1/step_0/user", "system.slice/job_1", {"max": 80, "current": 10}, 70),
    "of its own group": ("0::/a", "a", {"max": 8, "current": 2}, 6),
    "version 1": ("4:memory:/slurm/job_1", "memory/slurm", {"limit_in_bytes": 50, "usage_in_bytes": 20}, 30),
    "both": ("4:cpu,memory:/a\n0::/a", "memory/a", {"limit_in_bytes": 50, "usage_in_bytes": 20}, 30),
    "of another group": ("0::/a", "b", {"max": 8, "current": 2}, None),
    "of another controller": ("4:cpu:/a", "memory/a", {"limit_in_bytes": 8, "usage_in_bytes": 2}, None),
}


@pytest.mark.parametrize("case", LIMITS)
def test_available_memory_respects_own_cgroup_limits(case: str, tmp_path: Path, monkeypatch) -> None:
    membership, folder, mib, expected = LIMITS[case]
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    monkeypatch.setattr(files, "MEMBERSHIP", tmp_path / "membership")
    lay_out(tmp_path, {"membership": membership})
    unlimited = files.available_bytes()
    lay_out(tmp_path, {f"{folder}/memory.{name}".strip("/"): str(number << 20) for name, number in mib.items()})
    free = files.available_bytes()
    assert free == expected << 20 if expected else free > unlimited // 2


@pytest.mark.parametrize(("where", "name"), [("", "inactive_file"), ("memory", "total_inactive_file")])
def test_cached_files_count_as_free_memory(where: str, name: str, tmp_path: Path, monkeypatch) -> None:
    """Fails if a run that fits is rejected because a container has read a data set before."""
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    monkeypatch.setattr(files, "MEMBERSHIP", tmp_path / "membership")
    limit, used = ("limit_in_bytes", "usage_in_bytes") if where else ("max", "current")
    lay_out(tmp_path, {"membership": "1:memory:/" if where else "0::/"})
    numbers = {limit: str(100 << 20), used: str(90 << 20)}
    lay_out(tmp_path, {f"{where}/memory.{key}".strip("/"): value for key, value in numbers.items()})
    assert files.available_bytes() == 10 << 20
    stat = f"anon 5\n{name} {60 << 20}\nactive_file 1\n"
    lay_out(tmp_path, {f"{where}/memory.stat".strip("/"): stat})
    assert files.available_bytes() == 70 << 20


def test_available_cores_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert files.available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def lay_out(folder: Path, written: Mapping[str, str]) -> None:
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_non_finite_numbers_are_null_in_json():
    text = files.json_text(
        {"interval": (-math.inf, math.inf), "value": np.float64("nan"), "folder": Path("a"), "n": 0.5}
    )
    assert json.loads(text, parse_constant=pytest.fail) == {
        "interval": [None, None],
        "value": None,
        "folder": "a",
        "n": 0.5,
    }


@pytest.mark.parametrize(
    ("home", "accepted"),
    [("datasets--me--set/snapshots", True), ("models--me--m/snapshots", True), ("data/snapshots", False)],
)
def test_links_to_a_parent_folder_are_accepted_only_in_the_cache_of_the_hub(home, accepted, tmp_path: Path) -> None:
    folder = tmp_path / home / ("a" * 40) / "videos"
    folder.mkdir(parents=True)
    (blob := folder.parents[2] / "blob").write_text("x")
    (folder / "file").symlink_to(blob)
    (folder / "private").symlink_to(tmp_path / "private")
    (tmp_path / "private").write_text("x")
    for name, is_inside in (("file", accepted), ("private", False)):
        with nullcontext() if is_inside else pytest.raises(ValueError, match="is outside the folder"):
            assert files.inside(folder, name).read_text() == "x"


def test_scratch_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in (".tmp-7-config.yaml", "eval/step_000000/.tmp-7-eval.json", "eval/eval.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files.remove_scratch(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"eval/eval.json"}


def test_hidden_copies_are_skipped(tmp_path: Path) -> None:
    root = tmp_path / ".cache" / "set"  # hidden folders above the data set do not matter
    names = ["part_10.jsonl", "part_9.PARQUET", "._part_9.parquet", ".ipynb_checkpoints/part_9.parquet", "note.txt"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "folder.jsonl").mkdir()
    assert files.visible_files(root, ".jsonl", ".parquet") == [root / "part_9.PARQUET", root / "part_10.jsonl"]
