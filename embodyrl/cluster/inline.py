"""Everything in one process with one thread of control: for debuggers, golden numbers and small machines."""

import os
from collections import deque
from pathlib import Path

from embodyrl.cluster.deadline import Abandoned, Deadline
from embodyrl.cluster.protocol import ClusterSettings, Event, LauncherSettings, WorkerDied
from embodyrl.workers.lifecycle import Worker, WorkerSpec, describe_failure
from embodyrl.workers.messages import Request


class InlineLauncher:
    """Workers are objects; a request is carried out when the driver next waits."""

    settings = LauncherSettings
    section = None
    in_process = True
    host = "127.0.0.1"

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None:
        self._workers: dict[str, Worker] = {}
        self._restartable: set[str] = set()
        self._requests: deque[tuple[str, Request, float]] = deque()
        self._events: deque[Event] = deque()
        self._deadline = Deadline()

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        """See `Launcher.start`."""
        for key, value in spec.environ.items():
            os.environ.setdefault(key, value)
        try:
            with self._deadline.limit(timeout_s, stoppable=spec.restartable):
                worker = spec.build()
        except (Exception, Abandoned) as error:
            self._died(spec.name, error)
            return
        if spec.restartable:
            self._restartable.add(spec.name)
        self._workers[spec.name] = worker
        self._events.append(Event(worker=spec.name, message=worker.ready()))

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """See `Launcher.send`."""
        self._requests.append((worker, request, timeout_s))

    def wait(self, timeout_s: float) -> list[Event]:
        """See `Launcher.wait`."""
        if not self._events and self._requests:
            self._run(*self._requests.popleft())
        events = list(self._events)
        self._events.clear()
        return events

    def interrupt(self) -> None:
        """Leave a simulator at once; an update or a checkpoint comes to its end."""
        self._deadline.interrupt()

    def _run(self, name: str, request: Request, timeout_s: float) -> None:
        worker = self._workers[name]
        try:
            with self._deadline.limit(timeout_s, stoppable=name in self._restartable):
                self._events.extend(Event(worker=name, message=reply) for reply in worker.handle(request))
        except (Exception, Abandoned) as error:
            del self._workers[name]
            # Its restarted successor must not be asked for requests that died with it.
            self._requests = deque(waiting for waiting in self._requests if waiting[0] != name)
            worker.close()
            self._died(name, error)

    def _died(self, name: str, error: BaseException) -> None:
        told = describe_failure(error)
        reason = str(error) if isinstance(error, Abandoned) else f"raised {told.error}"
        died = WorkerDied(reason=reason, log="", traceback=told.traceback, exit_code=told.exit_code)
        self._events.append(Event(worker=name, message=died))

    def stop(self, *, grace_s: float = 10.0) -> None:
        """See `Launcher.stop`."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._deadline.close()
        self._requests.clear()
        self._events.clear()
