"""How many loaded tasks the memory of this machine holds."""

from __future__ import annotations

import re
from pathlib import Path

_SHARE = 0.8
"""Part of the free memory that simulators may take; the rest is for policies and buffers loaded after them."""


def tasks_in_memory(task_bytes: int, workers: int) -> int:
    """Tasks of `task_bytes` each that one of `workers` processes may keep loaded at the same time, at least 1."""
    return max(1, int(available_bytes() * _SHARE / max(workers, 1) / task_bytes))


def available_bytes() -> int:
    """Memory that the host and the control group still give; 0 where nobody says."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 0
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    assert match is not None, "/proc/meminfo without MemAvailable"
    available = int(match[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)
