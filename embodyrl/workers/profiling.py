"""CPU profile of a process during one training step (runner.profile), as events of a trace.

Each worker process has a profiler, which checks before each request if the driver profiles the current step. The
driver merges the events of all processes into the trace of the run.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from embodyrl.files import read_json, write_atomically

_INTERVAL_S = 0.005
"""Time between two samples of the Python stack."""
_MARKER_FILE = "profile.running"
"""File in the log folder that exists during the profiled step."""


class Profiler:
    """Profiler of one process: samples the Python stack of the main thread, and uses torch's profiler if loaded."""

    def __init__(self, name: str, log_dir: Path) -> None:
        self._name, self._mark = name, log_dir / _MARKER_FILE
        self._file = log_dir / f"profile_{name}.json"
        self._sampler: _StackSampler | None = None
        self._torch: Any = None

    def begin_step(self) -> None:
        """Start the profile of a training step in all processes of the run; called by the driver."""
        self._mark.touch()
        self.update()

    def end_step(self) -> None:
        """End the profile of the training step in all processes of the run; called by the driver."""
        self._mark.unlink(missing_ok=True)
        self.update()

    def update(self) -> None:
        """Start or stop this process's profile if the profiled step has started or ended."""
        if self._mark.exists() != (self._sampler is not None):
            self.close() if self._sampler else self._start()

    def _start(self) -> None:
        if "torch" in sys.modules:
            from torch.profiler import profile

            self._torch = profile()
            self._torch.start()
        self._sampler = _StackSampler(threading.get_ident())
        self._sampler.start()

    def close(self) -> None:
        """Stop the profile, if one is running, and write its events to the log folder."""
        if self._sampler is None:
            return
        events, self._sampler = self._sampler.end(), None
        events += [
            _build_metadata_event("process_name", 0, self._name),
            _build_metadata_event("thread_name", 0, "Python stack"),
        ]
        if self._torch is not None:
            self._torch.stop()
            self._torch.export_chrome_trace(str(self._file))
            events += _read_torch_events(self._file)
            self._torch = None
        write_atomically(self._file, json.dumps(events))


def _build_metadata_event(name: str, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": os.getpid(), "tid": tid, "args": {"name": value}}


def _read_torch_events(file: Path) -> list[dict[str, Any]]:
    """Return the events of a file that torch's profiler wrote, with times in microseconds since 1970."""
    trace: Any = read_json(file)
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = [event for event in trace["traceEvents"] if event.get("name") != "process_name"]
    return [event | {"ts": event["ts"] + base} if "ts" in event else event for event in events]


def read_profiles(log_dir: Path, epoch_us: float) -> list[dict[str, Any]]:
    """Return the events of all processes, with times in microseconds since `epoch_us`, and delete their files."""
    merged: list[dict[str, Any]] = []
    for file in sorted(log_dir.glob("profile_*.json")):
        events: Any = read_json(file)
        merged += [event | {"ts": event["ts"] - epoch_us} if "ts" in event else event for event in events]
        file.unlink()
    return merged


class _StackSampler(threading.Thread):
    """Thread that samples the Python stack of another thread, until `end`."""

    def __init__(self, sampled_thread: int) -> None:
        super().__init__(name="profiler", daemon=True)
        self._sampled_thread = sampled_thread
        self._ended = threading.Event()
        self._open: list[tuple[str, float]] = []
        """Name and start time of the running functions, outermost first."""
        self._events: list[dict[str, Any]] = []

    def run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            frame = sys._current_frames().get(self._sampled_thread)
            self._add(_format_stack(frame))
        self._add([])

    def _add(self, stack: list[str]) -> None:
        """Record the end of functions that are no longer in the stack, and the start of new functions."""
        now, common = time.time() * 1e6, 0
        while common < min(len(stack), len(self._open)) and self._open[common][0] == stack[common]:
            common += 1
        for name, start in self._open[common:]:
            event = {"ph": "X", "cat": "python", "name": name, "ts": start, "dur": now - start}
            self._events.append(event | {"pid": os.getpid(), "tid": 0})
        self._open[common:] = [(name, now) for name in stack[common:]]

    def end(self) -> list[dict[str, Any]]:
        """Stop the thread and return one event per function call, with times in microseconds since 1970."""
        self._ended.set()
        self.join()
        return self._events


def _format_stack(frame: FrameType | None) -> list[str]:
    """Return the functions of a stack, outermost first."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        names.append(f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])})")
        frame = frame.f_back
    return names[::-1]
