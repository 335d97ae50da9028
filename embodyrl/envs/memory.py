"""How many loaded tasks the memory of this machine holds."""

from embodyrl.files import available_bytes

_SHARE = 0.8
"""Part of the free memory that simulators may take; the rest is for policies and buffers loaded after them."""


def tasks_in_memory(task_bytes: int, workers: int) -> int:
    """Tasks of `task_bytes` each that one of `workers` processes may keep loaded at the same time, at least 1."""
    return max(1, int(available_bytes() * _SHARE / max(workers, 1) / task_bytes))
