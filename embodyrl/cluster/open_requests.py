"""What launchers of processes have in common: which requests are open, until when, and what became of their workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from embodyrl.clock import RunClock
from embodyrl.cluster.protocol import Event, ProcessSettings, WorkerDied
from embodyrl.errors import WorkerError


@dataclass(kw_only=True)
class Handle:
    """One running worker."""

    log: Path
    since: float
    """Start of the wait for the oldest open request."""
    limits: deque[float]
    """Allowed seconds of each unanswered request, oldest first."""

    @property
    def due(self) -> float:
        """When the oldest open request has to be answered."""
        return self.since + self.limits[0] if self.limits else float("inf")


H = TypeVar("H", bound=Handle)


class OpenRequests(Generic[H]):
    """A launcher's account of its workers."""

    settings = ProcessSettings
    in_process = False

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._clock = RunClock()
        self._handles: dict[str, H] = {}
        self._events: deque[Event] = deque()

    def _ask(self, worker: str, timeout_s: float) -> H:
        """Note one more open request of a worker.

        Raises:
            WorkerError: it is not running.
        """
        handle = self._handles.get(worker)
        if handle is None:
            raise WorkerError(f"worker {worker} is not running.")
        if not handle.limits:
            handle.since = self._clock.now()
        handle.limits.append(timeout_s)
        return handle

    def _answered(self, handle: H) -> None:
        """Its oldest open request is done; the next one's time begins."""
        handle.since = self._clock.now()
        if handle.limits:
            handle.limits.popleft()

    def _patience(self, timeout_s: float) -> float:
        """Seconds to wait for events: none if there are some, at most one, and not beyond a deadline."""
        due = min((handle.due for handle in self._handles.values()), default=float("inf"))
        return 0.0 if self._events else max(0.0, min(timeout_s, due - self._clock.now(), 1.0))

    def _late(self) -> list[str]:
        """Workers that missed a deadline."""
        return [name for name, handle in self._handles.items() if handle.due <= self._clock.now()]

    def _take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    def _bury(self, name: str, handle: H, reason: str, traceback: str, exit_code: int) -> None:
        """Report the death of a worker that is gone."""
        from embodyrl.workers.lifecycle import log_tail  # here, as every command looks up a launcher's settings

        died = WorkerDied(
            reason=reason, log=str(handle.log), traceback=traceback or log_tail(handle.log), exit_code=exit_code
        )
        self._events.append(Event(worker=name, message=died))

    def interrupt(self) -> None:
        """Nothing to do: the driver only waits."""
