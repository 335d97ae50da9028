"""GPU check of NCCL collectives, with one process per GPU as in a training run."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from embodyrl.devices import visible_gpus
from embodyrl_gpu_check.result import GpuParts, GpuResult

_BYTES = 512 * 10**6
_REPEATS = 5
_JOIN_S = 90.0
_RANK = "import sys; from embodyrl_gpu_check.links import run_rank; run_rank(*sys.argv[1:])"


def check_links() -> GpuResult:
    """Measure an all-gather and a reduce-scatter of 512 MB over all visible GPUs."""
    gpus = visible_gpus()
    if len(gpus) < 2:
        return GpuResult(level="skip", text="one GPU is visible, collectives need two")
    parts = GpuParts()
    text = ""
    with parts.part("collectives"):
        text = measure_links(parts, gpus, "nccl", _BYTES)
    return parts.result(text)


def measure_links(parts: GpuParts, gpus: tuple[str, ...], backend: str, size: int) -> str:
    """Measure the collectives with one process per GPU; return a sentence with the rates and NCCL transports.

    Raises:
        RuntimeError: a process failed; the message contains the last lines of its log.
    """
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = [_start_rank(folder, rank, len(gpus), gpu, port, backend, size) for rank, gpu in enumerate(gpus)]
        try:
            codes = [rank.wait(_JOIN_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for number, code in enumerate(codes):
            if code != 0:
                log = (folder / f"{number}.log").read_text()[-2000:]
                raise RuntimeError(f"rank {number} exited with code {code}; the end of its log: {log}")
        found = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(gpus))]
        logs = "\n".join(file.read_text(errors="replace") for file in folder.glob("*.log"))
    slowest = {key: max(row[key] for row in found) for key in found[0]}
    for key, value in slowest.items():
        parts.record(f"{key} of {size / 1e6:.0f} MB, seconds", round(value, 5))
    transferred = size * (len(gpus) - 1) / len(gpus)
    rates = {key: transferred / value / 1e9 for key, value in slowest.items()}
    parts.record("GB/s of each GPU", {key: round(value, 1) for key, value in rates.items()})
    transports = sorted({found for found in re.findall(r"via (P2P|SHM|NET)\b", logs)})
    parts.record("transports", transports)
    if "P2P" not in transports and backend == "nccl":
        parts.warnings.append(f"no direct transfers between GPUs, NCCL uses {', '.join(transports) or 'unknown'}")
    return f"{', '.join(f'{key} {value:.1f} GB/s' for key, value in rates.items())} via {', '.join(transports) or '?'}"


def _start_rank(
    folder: Path, rank: int, world: int, gpu: str, port: int, backend: str, size: int
) -> subprocess.Popen[Any]:
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": gpu,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    arguments = [str(folder / f"{rank}.json"), str(rank), str(world), backend, str(size)]
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen([sys.executable, "-c", _RANK, *arguments], env=environ, stdout=log, stderr=log)


def run_rank(out: str, rank: str, world: str, backend: str, size: str) -> None:
    """Run one rank, and write the median time of each collective in seconds to the JSON file `out`."""
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    dist.init_process_group(backend, rank=int(rank), world_size=int(world), timeout=timedelta(seconds=_JOIN_S))
    count = int(size) // 2 // int(world)
    shard = torch.ones(count, dtype=torch.bfloat16, device=device)
    gathered = torch.ones(count * int(world), dtype=torch.bfloat16, device=device)
    seconds = {
        "all-gather": _measure_median(lambda: dist.all_gather_into_tensor(gathered, shard), device),
        "reduce-scatter": _measure_median(lambda: dist.reduce_scatter_tensor(shard, gathered), device),
    }
    Path(out).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _measure_median(call: Any, device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):  # the first call connects
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[_REPEATS // 2]
