"""Busy time of workers, measured in the driver: utilization metrics, and a trace for Perfetto."""

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embodyrl.channels.arena import Arena, get_record_indices
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import Done, EnvReport, EnvRequest, InferRequest, Request, UpdateRequest
from embodyrl.cluster.protocol import Message
from embodyrl.files import natural_sort_key, write_atomically
from embodyrl.workers.profiling import Profiler, read_profiles

_TRACE_LIMIT = 500_000
"""Maximum number of spans in the trace, about 100 MB of JSON."""

CLOCK_METRICS = frozenset(
    f"rollout/{name}"
    for name in ("slot_occupancy", "policy_busy", "env_busy", "policy_waits_for_env", "env_waits_for_policy")
)
"""Names of metrics that depend on the speed of the machine."""


class Span(NamedTuple):
    """Execution of one request by one worker; times are in seconds since the start of the timeline."""

    worker: str
    name: str
    start: float
    end: float
    size: int
    """Number of environments, observations or records in the request."""
    detail: dict[str, float]


class Timeline:
    """Records a span for each request to a worker, for utilization metrics and a trace.

    A worker runs one request at a time, so a span starts when the previous span ends. The trace of a profiled step
    (runner.profile) also contains Python functions and torch operators.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        env_workers: Sequence[str],
        arena: Arena,
        trace: Path | None = None,
        profiled_step: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_envs = num_envs
        self._env_workers = env_workers
        self._arena = arena
        self._clock = clock
        self._start_time, self._start_epoch_us = clock(), time.time() * 1e6
        self._num_steps, self._profiled_step = 0, profiled_step
        self._profiler = Profiler("driver", trace.parent) if trace and profiled_step else None
        self._pending: dict[str, deque[tuple[str, float, int]]] = {}
        self._free_since: dict[str, float] = {}
        self._step_start = 0.0
        self._step: list[Span] = []
        self._staleness: Counter[int] = Counter()
        self._file = trace
        self._trace: list[Span] = []

    def begin(self) -> None:
        """Clear the spans of the previous step at the start of a training step, and start its profile."""
        self._num_steps += 1
        if self._profiler and self._num_steps == self._profiled_step:
            self._profiler.begin_step()
        self._step_start = self._now()
        self._step.clear()
        self._staleness.clear()

    def on_request(self, worker: str, request: Request) -> None:
        """Record that a request was sent."""
        self._pending.setdefault(worker, deque()).append((request.label, self._now(), _count_items(request)))
        # Read before the update, because the records may be reused afterwards.
        if isinstance(request, UpdateRequest):
            versions = self._arena[Record.version].take(get_record_indices(request.record_refs))
            counts = np.bincount(request.step - versions).tolist()
            self._staleness.update({age: count for age, count in enumerate(counts) if count})

    def on_reply(self, worker: str, message: Message) -> None:
        """Record the reply of a worker to its oldest request; other messages are ignored."""
        if isinstance(message, EnvReport):
            detail = {"sim_s": message.sim_s, "render_s": message.render_s, "reset_s": message.reset_s}
        elif isinstance(message, Done):
            detail = {"seconds": message.seconds}
        else:
            return
        if not self._pending.get(worker):
            return
        name, sent_at, size = self._pending[worker].popleft()
        now = self._now()
        # A worker runs one request at a time, so a request starts when it is sent or the previous request ends.
        self._add(Span(worker, name, max(sent_at, self._free_since.get(worker, 0.0)), now, size, detail))
        self._free_since[worker] = now

    def on_death(self, worker: str) -> None:
        """Record the death of a worker, and end the spans of its open requests."""
        for name, sent_at, size in self._pending.pop(worker, ()):
            self._add(Span(worker, f"{name} (died)", sent_at, self._now(), size, {}))

    def metrics(self) -> dict[str, float]:
        """Return the utilization during the rollout of the step, and the staleness of the training data.

        Utilization is measured up to the end of the last chunk.

        `policy_waits_for_env`: fraction of time in which the policy was idle while an env worker was busy.
        `env_waits_for_policy`: fraction of time in which an env worker was idle while the policy was busy, averaged
        over env workers. `staleness/k`: fraction of chunks that were k weight versions old when trained on;
        `staleness_mean`: mean of k. Ends the profile of the step.
        """
        if self._profiler:
            self._profiler.end_step()
        total = self._staleness.total()
        result = {f"rollout/staleness/{age}": n / total for age, n in sorted(self._staleness.items())}
        if total:
            result["rollout/staleness_mean"] = sum(age * n for age, n in self._staleness.items()) / total
        chunks = [span for span in self._step if span.name == "chunk"]
        if not chunks:
            return result
        # Requests of the previous step may be answered in this one, and resets of the next step may be open.
        start, end = self._step_start, max(span.end for span in chunks)
        spans_of_step = [
            span._replace(start=max(span.start, start), end=min(span.end, end))
            for span in self._step
            if span.start < end
        ]
        wall = max(end - start, 1e-9)
        inference = [span for span in spans_of_step if span.name == "infer"]
        by_worker = {worker: [s for s in spans_of_step if s.worker == worker] for worker in self._env_workers}
        env = [span for spans in by_worker.values() for span in spans]
        env_s = sum(_compute_busy_time(spans) for spans in by_worker.values())
        env_or_policy_s = sum(_compute_busy_time([*spans, *inference]) for spans in by_worker.values())
        return result | {
            "rollout/slot_occupancy": sum(s.size * (s.end - s.start) for s in [*inference, *env])
            / (self._num_envs * wall),
            "rollout/policy_busy": _compute_busy_time(inference) / wall,
            "rollout/env_busy": env_s / (len(by_worker) * wall),
            "rollout/policy_waits_for_env": (_compute_busy_time([*env, *inference]) - _compute_busy_time(inference))
            / wall,
            "rollout/env_waits_for_policy": (env_or_policy_s - env_s) / (len(by_worker) * wall),
        }

    def close(self) -> None:
        """Write the trace in the Chrome trace format, with a track per worker, unless there are no spans."""
        if self._profiler:
            self._profiler.end_step()
        if self._file is None or not self._trace:
            return
        tracks = {
            name: k for k, name in enumerate(sorted({s.worker for s in self._trace}, key=natural_sort_key), start=1)
        }
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": k, "args": {"name": name}} for name, k in tracks.items()
        ]
        for s in self._trace:
            start, end = round(s.start * 1e6), round(s.end * 1e6)
            place = {"pid": 1, "tid": tracks[s.worker], "ts": start, "dur": end - start}
            events.append({"ph": "X", "name": s.name, **place, "args": {"size": s.size, **s.detail}})
        if self._profiler:
            events += read_profiles(self._file.parent, self._start_epoch_us)
        write_atomically(self._file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")

    def _now(self) -> float:
        return self._clock() - self._start_time

    def _add(self, span: Span) -> None:
        if self._num_steps:  # without training steps, nothing would clear the list
            self._step.append(span)
        if self._file is not None and len(self._trace) < _TRACE_LIMIT:
            self._trace.append(span)


def _count_items(request: Request) -> int:
    """Return the number of environments, observations or records of a request."""
    if isinstance(request, EnvRequest):
        return len(request.env_indices) + len(request.resets)
    if isinstance(request, InferRequest):
        return len(request.record_refs)
    return sum(len(access.record_refs) for access in request.get_read_access())


def _compute_busy_time(spans: Sequence[Span]) -> float:
    """Return the time in which at least one span was active, which never exceeds wall-clock time."""
    total, covered_until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, covered_until))
        covered_until = max(covered_until, span.end)
    return total
