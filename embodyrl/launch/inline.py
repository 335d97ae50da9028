"""Everything in one process with one thread of control: for debuggers, golden numbers and small machines."""

from __future__ import annotations

import os
import traceback
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from embodyrl.channels.channel import InlineChannel
from embodyrl.config.schema import ClusterConfig
from embodyrl.errors import EmbodyError
from embodyrl.launch.protocol import Event, WorkerDied
from embodyrl.workers.lifecycle import Worker, WorkerSpec


class _Seat(NamedTuple):
    worker: Worker
    orders: InlineChannel
    """The driver's end."""
    inbox: InlineChannel
    """The worker's end."""


class InlineLauncher:
    """Workers are objects; an order is carried out when the driver next waits."""

    host = "127.0.0.1"

    def __init__(self, log_dir: Path, cluster: ClusterConfig | None = None) -> None:
        self._workers: dict[str, _Seat] = {}
        self._turns: deque[str] = deque()
        self._events: deque[Event] = deque()

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        for key, value in spec.environ.items():
            os.environ.setdefault(key, value)
        try:
            worker = spec.build()
        except Exception as error:
            self._died(spec.name, error)
            return
        orders, inbox = InlineChannel.pair()
        self._workers[spec.name] = _Seat(worker, orders, inbox)
        self._events.append(Event(worker=spec.name, message=worker.ready()))

    def send(self, worker: str, order: Any, *, timeout_s: float) -> None:
        self._workers[worker].orders.put(order)
        self._turns.append(worker)

    def wait(self, timeout_s: float) -> list[Event]:
        if not self._events and self._turns:
            self._run(self._turns.popleft())
        events = list(self._events)
        self._events.clear()
        return events

    def _run(self, name: str) -> None:
        seat = self._workers[name]
        order = seat.inbox.get(0.0)
        try:
            self._events.extend(Event(worker=name, message=reply) for reply in seat.worker.handle(order))
        except Exception as error:
            del self._workers[name]
            # Its restarted successor must not be asked for orders that died with it.
            self._turns = deque(turn for turn in self._turns if turn != name)
            seat.worker.close()
            self._died(name, error)

    def _died(self, name: str, error: Exception) -> None:
        text = str(error) if isinstance(error, EmbodyError) else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, EmbodyError) else 1
        died = WorkerDied(reason=f"raised {text}", log="", traceback=traceback.format_exc(), exit_code=code)
        self._events.append(Event(worker=name, message=died))

    def pid(self, worker: str) -> int:
        return os.getpid()

    def stop(self, *, grace_s: float = 10.0) -> None:
        for seat in self._workers.values():
            seat.worker.close()
        self._workers.clear()
        self._turns.clear()
        self._events.clear()
