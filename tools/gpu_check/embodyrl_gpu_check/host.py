"""Check of a host's limits: shared memory, ulimits, control groups, cores, and the NUMA node of each GPU."""

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from embodyrl.devices import visible_gpus
from embodyrl.files import available_bytes, available_cores, control_groups
from embodyrl_gpu_check.result import GpuParts, GpuResult

_GIB = 2**30
_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_LIMITS = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "pids.max", "cpuset.cpus.effective")
_OLD_LIMITS = ("memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us", "pids.max", "cpuset.cpus")
_MIN_OPEN_FILES = 4096


def check_host() -> GpuResult:
    """Check the limits of the host; return warnings and values."""
    parts, gpus = GpuParts(), visible_gpus()
    fix = ""
    with parts.part("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm")
        parts.record("/dev/shm GiB free and total", [round(shared.free / _GIB, 2), round(shared.total / _GIB, 2)])
        if len(gpus) > 1 and shared.free < _GIB:
            parts.warnings.append(f"/dev/shm has {shared.free / _GIB:.2f} GiB for {len(gpus)} GPUs")
            fix = "docker run --shm-size=16g, or --ipc=host"
    with parts.part("ulimits"):
        for flag, kind in (("l", "RLIMIT_MEMLOCK"), ("n", "RLIMIT_NOFILE"), ("u", "RLIMIT_NPROC")):
            parts.record(
                f"ulimit -{flag}, soft and hard", [*map(_format_limit, resource.getrlimit(getattr(resource, kind)))]
            )
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 <= soft < _MIN_OPEN_FILES and len(gpus) > 1:
            parts.warnings.append(f"ulimit -n is {soft}")
            fix = fix or f"ulimit -n {_MIN_OPEN_FILES}"
    with parts.part("control groups"):
        parts.record("control groups", cgroup_limits())
    with parts.part("cores and memory"):
        affinity = os.sched_getaffinity(0)
        parts.record("cores", {"usable": available_cores(), "affinity": len(affinity), "host": os.cpu_count()})
        parts.record("free GiB", round(available_bytes() / _GIB, 1))
        parts.record("/tmp GiB free", round(shutil.disk_usage("/tmp").free / _GIB, 1))
    with parts.part("NUMA nodes"):
        _compare_nodes(parts)
    text = f"{available_cores()} cores, {available_bytes() / _GIB:.0f} GiB free"
    return parts.result(f"{text}, /dev/shm {shutil.disk_usage('/dev/shm').total / _GIB:.1f} GiB", fix)


def _format_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def cgroup_limits() -> dict[str, str]:
    """Return the limits of this process's control group and of all parent groups, by path of the cgroup file."""
    limits = {}
    for controller in ("memory", "cpu", "pids", "cpuset"):
        for folder, unified in control_groups(controller):
            for name in _LIMITS if unified else _OLD_LIMITS:
                file = folder / name
                if file.is_file() and str(file) not in limits:
                    limits[str(file)] = file.read_text().strip()
    return limits


def parse_cpus(text: str) -> set[int]:
    """Return the CPU numbers in a list such as `0-2,8`.

    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    numbers = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        numbers |= {*range(int(first), int(last or first) + 1)}
    return numbers


def _compare_nodes(parts: GpuParts) -> None:
    """Add a warning if no core of a GPU's NUMA node is available to this process."""
    affinity = os.sched_getaffinity(0)
    nodes = {int(path.name[4:]): parse_cpus((path / "cpulist").read_text()) for path in _NODES.glob("node[0-9]*")}
    parts.record("cores of NUMA nodes", {node: len(cores & affinity) for node, cores in nodes.items()})
    for number, bus in _get_bus_ids().items():
        file = _PCI / bus / "numa_node"
        if not file.is_file():
            parts.record(f"NUMA node of GPU {number}", f"unknown: no {file}")
            continue
        node = int(file.read_text())
        parts.record(f"NUMA node of GPU {number}", node)
        if node in nodes and not nodes[node] & affinity:
            parts.warnings.append(f"GPU {number} is on NUMA node {node}, none of whose cores this process may use")


def _get_bus_ids() -> dict[int, str]:
    """Return the directory name in /sys (PCI address) of each GPU, by GPU number."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=index,pci.bus_id", "--format=csv,noheader"]
    process = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    # nvidia-smi writes the domain with eight digits, /sys with four.
    matches = re.findall(r"^(\d+), *[0-9A-Fa-f]*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)$", process.stdout, re.M)
    return {int(number): bus.lower() for number, bus in matches}
