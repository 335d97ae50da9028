"""Detection of the GPUs of this host, and assignment of GPUs to the processes of a run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

MIB = 2**20
DEV = Path("/dev")
PROCESSOR = Path("/proc/cpuinfo")
_QUERY_FIELDS = ("index", "uuid", "memory.free", "memory.total", "mig.mode.current", "driver_version", "name")
_QUERY_TIMEOUT_S, _TORCH_TIMEOUT_S = 20.0, 120.0
_FREE_MEMORY_CODE = """
import torch
for number in range(torch.cuda.device_count()):
    print(*torch.cuda.mem_get_info(number))
"""


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as names for CUDA_VISIBLE_DEVICES; torch is not imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        num_devices = len(list(DEV.glob("nvidia[0-9]*")))
        # Windows' subsystem for Linux has one device node for all GPUs.
        return tuple(map(str, range(len(query_gpus()) if not num_devices and (DEV / "dxg").exists() else num_devices)))
    # Like CUDA: an invalid name (Slurm writes NoDevFiles) hides itself and all later entries.
    valid = re.compile(r"\d+|GPU-.*|MIG-.*").fullmatch
    return tuple(takewhile(valid, (name.strip() for name in visible.split(","))))


def supports_bfloat16() -> bool:
    """Return True if this host supports bfloat16 natively: a GPU, or a CPU with AVX-512, AMX or Arm's extension.

    The result is also True for a CPU with unknown features.
    """
    if visible_gpus() or not PROCESSOR.is_file():
        return True
    features = re.findall(r"^(?:flags|Features)\s*:(.*)", PROCESSOR.read_text(encoding="utf-8", errors="replace"), re.M)
    return not features or bool({"avx512_bf16", "amx_bf16", "bf16"} & {*features[0].split()})


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as listed by `nvidia-smi`."""

    number: int
    uuid: str
    free: int
    """Free memory in bytes."""
    total: int
    is_mig: bool
    """True in MIG mode, in which CUDA lists slices of the GPU."""
    driver: int
    """Major version of the driver; 0 if unknown."""
    name: str


def query_gpus() -> tuple[Gpu, ...]:
    """List all GPUs of this host, visible or not, with `nvidia-smi`; return an empty tuple if the program fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, f"--query-gpu={','.join(_QUERY_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:  # a hanging driver is reported by the process that uses it
        return ()
    gpus = []
    for line in result.stdout.splitlines():
        row = [cell.strip() for cell in line.split(",")]
        if len(row) == len(_QUERY_FIELDS) and row[0].isdigit() and row[2].isdigit() and row[3].isdigit():
            number, uuid, free, total, mig, version, name = row
            driver = int(match[0]) if (match := re.match(r"\d+", version)) else 0
            gpus.append(Gpu(int(number), uuid, int(free) * MIB, int(total) * MIB, mig == "Enabled", driver, name))
    return tuple(gpus)


def select_visible(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs in `gpus` that this process may use; visible names without a match are skipped."""
    return tuple(
        gpu
        for name in visible_gpus()
        for gpu in gpus
        if (gpu.number == int(name) if name.isdigit() else gpu.uuid.startswith(name))
    )


class Gpus:
    """Memory and models of the visible GPUs, queried with `nvidia-smi` at the first access."""

    @property
    def free(self) -> int:
        """Free memory in bytes of the visible GPU with the least free memory; 0 if unknown."""
        return min((free for free, _ in self._memory), default=0)

    @property
    def total(self) -> int:
        """Total memory in bytes of the smallest visible GPU; 0 if unknown."""
        return min((total for _, total in self._memory), default=0)

    @property
    def kinds(self) -> set[str]:
        """Model names of the visible GPUs."""
        return {gpu.name for gpu in select_visible(self._all_gpus)}

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Names in CUDA_VISIBLE_DEVICES of GPUs that this host does not have; MIG names are not checked."""
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return ()
        names = tuple(name for name in visible_gpus() if not name.startswith("MIG-"))
        if not self._all_gpus:  # torch decides, unless there is a device that nvidia-smi does not list
            return () if any(DEV.glob("nvidia[0-9]*")) or _query_torch_memory() else names
        known = {str(gpu.number) for gpu in self._all_gpus}, tuple(gpu.uuid for gpu in self._all_gpus)
        return tuple(
            name for name in names if name not in known[0] and not any(uuid.startswith(name) for uuid in known[1])
        )

    @cached_property
    def _all_gpus(self) -> tuple[Gpu, ...]:
        return query_gpus()

    @cached_property
    def _memory(self) -> list[tuple[int, int]]:
        """(free, total) memory in bytes of each visible GPU."""
        gpus, names = self._all_gpus, visible_gpus()
        selected = select_visible(gpus)
        # `nvidia-smi` counts GPUs by PCI bus and CUDA by speed, which differs on a host with several models.
        sorted_by_speed = len({gpu.name for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        needs_torch = (sorted_by_speed and any(name.isdigit() for name in names)) or (
            any(gpu.is_mig for gpu in selected) or any(name.startswith("MIG-") for name in names)
        )
        torch_memory = _query_torch_memory() if gpus and names and needs_torch else []
        return torch_memory or [(gpu.free, gpu.total) for gpu in selected]


def _query_torch_memory() -> list[tuple[int, int]]:
    """Return (free, total) memory in bytes of each GPU, as reported by torch in a separate process."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _FREE_MEMORY_CODE],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    rows = [line.split() for line in result.stdout.splitlines()]
    return [(int(row[0]), int(row[1])) for row in rows if len(row) == 2 and all(cell.isdigit() for cell in row)]


@dataclass(frozen=True, slots=True)
class Devices:
    """Assignment of GPUs to the processes of a run; empty on a host without GPUs."""

    policies: tuple[str, ...] = ()
    """GPUs of the actor ranks, then of the inference processes."""
    simulators: tuple[str, ...] = ()
    """GPUs of the env workers, assigned round-robin."""

    def get_policy_gpu(self, number: int) -> str | None:
        """Return the GPU of a policy process; None: the process has the same visible GPUs as the driver."""
        return self.policies[number] if self.policies else None

    def get_env_worker_gpu(self, number: int, *, on_gpu: bool | None) -> str | None:
        """Return the GPU of an env worker; empty string: no GPU; None: the same visible GPUs as the driver.

        `on_gpu` is `SimulatorSpec.on_gpu`.
        """
        if on_gpu is False:
            return ""
        return self.simulators[number % len(self.simulators)] if self.simulators else None


def assign_devices(gpus: Sequence[str], num_policies: int) -> Devices:
    """Assign one GPU to each policy process, and the remaining GPUs (or all GPUs, if none remain) to simulators."""
    policy_gpus = tuple(gpus[number % len(gpus)] for number in range(num_policies if gpus else 0))
    return Devices(policies=policy_gpus, simulators=tuple(gpu for gpu in gpus if gpu not in policy_gpus) or tuple(gpus))
