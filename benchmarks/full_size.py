"""Measure time and peak memory of whole commands at published sizes with random bfloat16 weights, against the plan.

    python benchmarks/full_size.py --json full.json --folder full          OpenVLA-OFT 7B on LIBERO: train to export
    python benchmarks/full_size.py --json pi05.json --folder pi05 --model pi05     pi0.5 3.3B: evaluation
    python benchmarks/full_size.py --json tiny.json --folder tiny --size tiny      the same code path in a minute

Random weights do not succeed, and equal returns give no gradient, so the reward penalizes actions.

Parts: write the checkpoint (public layout, 15 GB), plan (`--dry-run`), train one step, resume to a second one, export
the run, and evaluate the export. The flow models are written, planned and evaluated. A part reuses the files of earlier
parts in `--folder`. The JSON is written after each part; memory is that of all processes of the part, sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from random_weights import MODELS, Choice, shapes_of, write_side_files, write_weights

from embodyrl.files import available_cores

GIB = 2**30
SAMPLE_S = 0.5
REWARD = """def effort(step):
    return -0.01 * float(abs(step.action).sum())
"""
"""Source of the reward in a separate module, because env workers do not import torch."""


@dataclass
class Peak:
    """Largest sampled memory of a part, bytes."""

    host: int = 0
    """Memory of all processes: unshared memory, and shared memory once, without mapped files."""
    gpu: int = 0
    """Memory of all GPUs, in addition to what was used before the part."""
    processes: dict[str, int] = field(default_factory=dict)
    """Host memory of each process by name."""

    def take(self, processes: dict[str, int], gpu: int) -> None:
        """Add a sample."""
        self.host = max(self.host, sum(processes.values()))
        self.gpu = max(self.gpu, gpu)
        for name, used in processes.items():
            self.processes[name] = max(self.processes.get(name, 0), used)

    def row(self) -> dict[str, Any]:
        """Return the peaks in GiB."""
        named = {name: round(used / GIB, 3) for name, used in self.processes.items() if used > GIB / 100}
        return {"host_gib": self.host / GIB, "gpu_gib": self.gpu / GIB, "processes_gib": named}


def memory_of(pid: int) -> dict[str, int]:
    """Return the memory of a process and its descendants by name; shared memory is divided among its users."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _text(entry / "stat")):
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    used: dict[str, int] = {}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        name = _text(Path(f"/proc/{one}/comm")).strip()
        found = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", _text(Path(f"/proc/{one}/smaps_rollup")), re.MULTILINE)
        used[name] = used.get(name, 0) + 1024 * sum(map(int, found))
    return used


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the process has exited


def gpu_bytes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    return 2**20 * sum(map(int, done.stdout.split()))


@contextmanager
def sampled(pid: int) -> Iterator[Peak]:
    """Sample the memory of a process tree and of the GPUs until the block ends."""
    peak, done, before = Peak(), threading.Event(), gpu_bytes()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            peak.take(memory_of(pid), gpu_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@dataclass
class Job:
    """One model at one size in one folder."""

    args: argparse.Namespace
    ends: float
    """Time of `time.monotonic` at which no part may run any more."""

    @property
    def model(self) -> Choice:
        return MODELS[self.args.model]

    @property
    def trains(self) -> bool:
        return "train" in self.model.parts

    @property
    def checkpoint(self) -> Path:
        return self.args.folder / "checkpoint"

    @property
    def exported(self) -> Path:
        return self.args.folder / "exported"

    @property
    def run(self) -> Path:
        return max((self.args.folder / "train").iterdir(), key=lambda path: path.stat().st_mtime)

    def words(self, command: str) -> list[str]:
        """Return the arguments of a short job of this model; what trains is evaluated as exported."""
        steps, num_envs = self.args.chunks * self.model.chunk, self.args.env_indices
        path = self.exported if command == "eval" and self.trains else self.checkpoint
        words = [
            command, "env=libero_10", f"model={self.model.preset}", f"model.path={path}", "model.precision=bf16",
            "env.fast_physics=true", f"env.eval.max_episode_steps={steps}", f"env.eval.total_num_envs={num_envs}",
            f"runner.output_dir={self.args.folder / command}", "runner.logger.backends=[jsonl]",
        ]  # fmt: skip
        if command == "train":
            words += [
                "model.is_lora=true", "runner.max_steps=1", f"env.train.max_episode_steps={steps}",
                f"env.train.total_num_envs={num_envs}", f"algorithm.group_size={num_envs}", "env.train.task_ids=[0]",
                "reward.path=effort:effort",
            ]  # fmt: skip
        else:
            words += ["env.eval.task_ids=[0]", f"eval.episodes={num_envs}"]
        return words + self.args.set


def embodyrl(job: Job, part: str, *words: str) -> dict[str, Any]:
    """Run a command, and return its exit code, seconds, peak memory and last lines."""
    log = job.args.folder / f"{part}.log"
    left = job.ends - time.monotonic()
    if left <= 0:
        return {"exit": None, "tail": "not started: the deadline has passed"}
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "embodyrl.cli.main", *words]
        path = os.pathsep.join([str(job.args.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ)
        with sampled(process.pid) as peak:
            try:
                code: int | None = process.wait(left)
            except subprocess.TimeoutExpired:
                process.terminate()
                code = None
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    seconds = time.perf_counter() - started
    lines = log.read_text(encoding="utf-8").splitlines()
    row = {"command": " ".join(words), "exit": code, "seconds": seconds}
    return row | peak.row() | ({} if code == 0 and part != "plan" else {"tail": lines[-25:]})


def plan(job: Job) -> dict[str, Any]:
    command = "train" if job.trains else "eval"
    return embodyrl(job, "plan", *job.words(command), "--dry-run")


def train(job: Job) -> dict[str, Any]:
    return embodyrl(job, "train", *job.words("train")) | {"metrics": last_metrics(job)}


def resume(job: Job) -> dict[str, Any]:
    words = ("train", "--resume", str(job.run), "runner.max_steps=2", "trust=true")
    return embodyrl(job, "resume", *words) | {"metrics": last_metrics(job)}


def last_metrics(job: Job) -> dict[str, Any]:
    lines = _text(job.run / "metrics.jsonl").splitlines() if (job.args.folder / "train").is_dir() else []
    return json.loads(lines[-1]) if lines else {}


def export(job: Job) -> dict[str, Any]:
    shutil.rmtree(job.exported, ignore_errors=True)
    return embodyrl(job, "export", "ckpt", "export", str(job.run), str(job.exported))


def evaluate(job: Job) -> dict[str, Any]:
    return embodyrl(job, "eval", *job.words("eval"))


def write(job: Job) -> dict[str, Any]:
    """Write the checkpoint folder: side files, and random weights under the public names."""
    folder, model = job.checkpoint, job.args.model
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    with sampled(os.getpid()) as peak:
        names = write_side_files(folder, model, job.args.size)
        shapes = {names(name): shape for name, shape in shapes_of(folder, model).items()}
        total = write_weights(folder, shapes)
    seconds = time.perf_counter() - started
    return {"exit": 0, "seconds": seconds, "weights_gib": total / GIB} | peak.row()


RUN = {"write": write, "plan": plan, "train": train, "resume": resume, "export": export, "eval": evaluate}


def machine() -> dict[str, Any]:
    device = "no GPU"
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        device = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return {"device": device, "cpu": platform.machine(), "cores": available_cores(), "memory_gib": memory} | {
        "torch": torch.__version__
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for checkpoint, runs and logs: 35 GB at full size"
    )
    parser.add_argument("--model", choices=[*MODELS], default="openvla_oft")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--parts", nargs="+", choices=[*RUN], help="parts to run; default: all parts of the model")
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=2, help="chunks of an episode")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="additional overrides of train and eval"
    )
    parser.add_argument(
        "--deadline", type=float, default=14400.0, metavar="S", help="time limit of all parts in seconds"
    )
    args = parser.parse_args()
    if unknown := set(args.parts or ()) - set(MODELS[args.model].parts):
        parser.error(f"--model {args.model} has no part {', '.join(sorted(unknown))}")
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "effort.py").write_text(REWARD, encoding="utf-8")
    job, rows = Job(args, time.monotonic() + args.deadline), []
    for part in args.parts or job.model.parts:
        rows.append({"part": part} | RUN[part](job))
        content = {"model": args.model, "size": args.size, "machine": machine(), "parts": rows}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(json.dumps({key: rows[-1][key] for key in rows[-1] if key not in ("command", "metrics")}), flush=True)
        if rows[-1]["exit"] != 0:
            sys.exit(f"{part} failed; its log: {args.folder / f'{part}.log'}")


if __name__ == "__main__":
    main()
