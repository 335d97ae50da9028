"""Streams, events and graphs of the fake GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

ON: list[Any] = []
"""The active fake devices (see `fakegpu.py`)."""


class Stream(torch.cpu.Stream):
    priority, device = 0, torch.device("cuda", 0)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__()

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    def __init__(self, *args: Any, **more: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Graph:
    """Captured kernels: a replay is one launch."""

    kernels, seconds = 0, 0.0

    def replay(self) -> None:
        gpu = ON[-1]
        gpu.kernels, gpu.seconds = gpu.kernels + 1, gpu.seconds + self.seconds
        gpu.by_op["replay"][0] += 1


@contextlib.contextmanager
def record(graph: Graph, pool: Any = None) -> Any:
    gpu = ON[-1]
    before, gpu.recording = (gpu.kernels, gpu.seconds), True
    live, peak, gpu.peak = gpu.live, gpu.peak, gpu.live
    try:
        yield
    finally:
        graph.kernels, graph.seconds = gpu.kernels - before[0], gpu.seconds - before[1]
        (gpu.kernels, gpu.seconds), gpu.recording = before, False
        grown = max(0, gpu.peak - live - gpu.pool)  # recordings share what the largest of them takes
        gpu.pool, gpu.live = gpu.pool + grown, gpu.live + max(0, grown - (gpu.live - live))
        gpu.peak = max(peak, gpu.peak)
