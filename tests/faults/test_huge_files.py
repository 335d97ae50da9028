"""Files of 40 GB in run folders and data sets: readers read a small part, in little memory."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import command_environment
from toy_runs import train_toy

from embodyrl.checkpoint.tensors import load_tensors
from embodyrl.errors import CheckpointError
from embodyrl.monitor.history import read_rows
from embodyrl.policies.weights import fill_weights

HUGE = 40 << 30
READER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from embodyrl.cli.main import main
code = main(sys.argv[1:])
with open("/proc/self/io") as file:
    print("bytes read", file.readline().split()[1], file=sys.stderr)
sys.exit(code)
"""
REPORT, CARD, VIEW = ("report", "{run}", "--out", "{run}.html"), ("card", "{run}"), ("view", "{run}")
LIST = ("list", "runs", "runner.output_dir={run}/..")
RESUME = ("train", "--resume", "{run}", "runner.max_steps=3", "trust=true")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("runner.save_interval=1", "runner.val_check_interval=1", "eval.episodes=2")
    return train_toy(tmp_path_factory.mktemp("healthy"), *words)


def grow(path: Path) -> None:
    """Append a hole to a file, up to 40 GB."""
    with path.open("ab") as file:
        file.truncate(HUGE)


def run_reader(*words: str, folder: Path) -> tuple[int, str]:
    """Run a command with 4 GiB of memory; return its exit code and output, and check that it read less than 400 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", READER, *words],
        **{"cwd": folder, "env": command_environment(folder), "capture_output": True, "text": True},
        check=False,
    )
    said, _, count = done.stderr.rpartition("bytes read ")
    assert count.strip().isdecimal(), done.stderr
    assert int(count) < 400 << 20
    return done.returncode, done.stdout + said


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "words", "code", "said"),
    [
        ("metrics.jsonl", REPORT, 0, ""),
        ("metrics.jsonl", LIST, 0, "run"),
        ("metrics.jsonl", RESUME, 0, ""),
        ("eval/step_000002/episodes.jsonl", CARD, 0, ""),
        ("eval/step_000002/eval.json", CARD, 2, "is not a table of results"),
        ("logs/events.log", REPORT, 0, ""),
        ("lock", VIEW, 0, ""),
        ("config.yaml", CARD, 2, "a config has at most"),
        ("checkpoints/step_000002/policy/model.safetensors", RESUME, 6, "instead of"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_commands_read_only_a_small_part_of_a_huge_file(healthy, tmp_path, name, words, code, said):
    run = tmp_path / "runs" / "run"
    shutil.copytree(healthy, run)
    grow(run / name)
    found = run_reader(*(word.format(run=run) for word in words), folder=tmp_path)
    assert found[0] == code, found[1]
    assert said in found[1], found[1]
    newest = 3 if words is RESUME and code == 0 else 2
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [*range(newest + 1)]


def test_rows_before_and_after_a_hole_in_a_sparse_file_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    grow(path)
    with path.open("ab") as file:
        file.write(b'\n{"step": 2}\n')
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def header(**tensors: tuple[list[int], int, int]) -> bytes:
    """Return a safetensors header; each tensor has a shape and the offsets of its first and last byte."""
    body = {name: {"dtype": "F32", "shape": shape, "data_offsets": [a, b]} for name, (shape, a, b) in tensors.items()}
    return struct.pack("<Q", len(text := json.dumps(body).encode())) + text


TRUE = header(a=([10 << 30], 0, HUGE))
LYING = {
    "header longer than the file": struct.pack("<Q", 1 << 62),
    "header of 30 GB": struct.pack("<Q", 30 << 30),
    "no tensors": header(),
    "tensor behind the end": header(a=([1 << 40], 0, 1 << 42)),
    "overflowing shape": header(a=([1 << 32, 1 << 32, 1 << 32], 0, 4)),
    "shape and size differ": header(a=([1 << 30], 0, 4)),
    "overlapping tensors": header(a=([10 << 30], 0, HUGE), b=([10 << 30], 0, HUGE)),
}


@pytest.mark.parametrize("content", LYING.values(), ids=LYING)
def test_sparse_weights_with_a_wrong_header_are_rejected(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with path.open("ab") as file:
        file.truncate(HUGE + len(TRUE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (load_tensors, lambda file: fill_weights({}, file, optional=(), fix="")):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19


def test_sparse_weights_of_another_model_are_rejected_without_reading_them(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(TRUE)
    with path.open("ab") as file:
        file.truncate(HUGE + len(TRUE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"differ in shape|Cannot allocate memory"):
        fill_weights({"a": torch.zeros(3)}, path, optional=(), fix="")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19
