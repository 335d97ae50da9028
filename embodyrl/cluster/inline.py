"""Launcher that runs all workers in one process and thread: for debuggers, golden tests and small machines."""

import faulthandler
import math
import os
import secrets
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from embodyrl.channels.messages import Request
from embodyrl.clock import RunClock
from embodyrl.cluster.protocol import ClusterSettings, Event, Launcher, LauncherSettings, WorkerDied
from embodyrl.process_cleanup import kill_marked_children, mark_children
from embodyrl.workers.lifecycle import Worker, WorkerSpec, describe_failure, keep_freed_memory

_TICK_S = 1.0
_STACK_DUMP_DELAY_S = 10


class RequestInterrupted(BaseException):
    """The running request was interrupted. Not an `Exception`, because simulators may catch exceptions."""


class Deadline:
    """Time limit of code in the main thread, enforced by a timer signal. Code in other threads has no limit.

    The kernel's timer interrupts waits (sleeps, locks, sockets), and Python runs the handler between two instructions.
    C code that neither returns nor checks for signals cannot be interrupted: after a delay, a thread without the
    interpreter lock dumps all stacks to standard error. `launcher=local` kills such a worker.
    """

    def __init__(self) -> None:
        self._clock = RunClock()
        self._limit_s = self._due = math.inf
        self._stoppable = False
        self._watchdog_postponed_at = -math.inf
        self._is_active = threading.current_thread() is threading.main_thread()
        if self._is_active:
            self._previous_handler = signal.signal(signal.SIGALRM, self._tick)

    @contextmanager
    def limit(self, seconds: float, *, stoppable: bool) -> Iterator[None]:
        """Raise `RequestInterrupted` in the block after `seconds`, or at `interrupt` if the block is `stoppable`."""
        if not self._is_active:
            yield
            return
        self._limit_s, self._due = seconds, self._clock.now() + seconds
        self._watch()
        # Ticks instead of one alarm: only time in which this process ran counts.
        signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
        # Set immediately before the block: an earlier interrupt would leave the timer running.
        self._stoppable = stoppable
        try:
            yield
        finally:
            self._stoppable, self._due = False, math.inf
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def interrupt(self) -> None:
        """Interrupt the current block of `limit` if the block is stoppable; called by a signal handler."""
        if self._stoppable:
            raise RequestInterrupted("was interrupted")

    def close(self) -> None:
        """Remove the signal handler and the watchdog; idempotent."""
        if self._is_active:
            self._is_active = False
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, self._previous_handler or signal.SIG_DFL)

    def _tick(self, signum: int, frame: FrameType | None) -> None:
        self._watch()
        # No deadline under a debugger.
        if self._clock.now() >= self._due and sys.gettrace() is None:
            raise RequestInterrupted(f"did not respond for {self._limit_s:g} s")

    def _watch(self) -> None:
        """Postpone the watchdog's stack dump at most once per second, because each call starts a thread."""
        if self._clock.now() - self._watchdog_postponed_at >= _TICK_S:
            self._watchdog_postponed_at = self._clock.now()
            faulthandler.dump_traceback_later(math.ceil(self._limit_s) + _STACK_DUMP_DELAY_S, file=2)


class InlineLauncher(Launcher):
    """Launcher whose workers are objects in this process; requests run when the driver waits."""

    settings = LauncherSettings
    in_process = True

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None:
        keep_freed_memory()
        self._workers: dict[str, Worker] = {}
        self._simulating: set[str] = set()
        self._owner = f"workers {secrets.token_hex(8)}"
        self._requests: deque[tuple[str, Request, float]] = deque()
        self._events: deque[Event] = deque()
        self._deadline = Deadline()

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        """Build a worker in this process."""
        for key, value in spec.environ.items():
            os.environ.setdefault(key, value)
        if spec.simulates:
            self._simulating.add(spec.name)
        try:
            with self._deadline.limit(timeout_s, stoppable=spec.simulates), self._mark_processes(spec.simulates):
                worker = spec.build()
        except (Exception, SystemExit, RequestInterrupted) as error:
            self._report_error(spec.name, error)
            return
        self._workers[spec.name] = worker
        self._events.append(Event(worker=spec.name, message=worker.ready()))

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Queue a request, which `wait` runs."""
        self._requests.append((worker, request, timeout_s))

    def wait(self, timeout_s: float) -> list[Event]:
        """Run the next request, and return its replies or the death of its worker."""
        # One request at a time, so that the loop can handle its reply first.
        if not self._events and self._requests:
            self._run(*self._requests.popleft())
        events = list(self._events)
        self._events.clear()
        return events

    def interrupt(self) -> None:
        """Interrupt a simulator immediately; updates and checkpoints finish first."""
        self._deadline.interrupt()

    def _run(self, name: str, request: Request, timeout_s: float) -> None:
        worker = self._workers[name]
        simulates = name in self._simulating
        try:
            with self._deadline.limit(timeout_s, stoppable=simulates), self._mark_processes(simulates):
                self._events.extend(Event(worker=name, message=reply) for reply in worker.handle(request))
        except (Exception, SystemExit, RequestInterrupted) as error:
            del self._workers[name]
            # The restarted worker must not get requests of the dead worker.
            self._requests = deque(queued for queued in self._requests if queued[0] != name)
            worker.close()
            self._report_error(name, error)

    def _mark_processes(self, simulates: bool) -> AbstractContextManager[None]:
        """Mark processes started by an environment, so that they are killed at the end of the run."""
        return mark_children(self._owner) if simulates else nullcontext()

    def _report_error(self, name: str, error: BaseException) -> None:
        failure = describe_failure(error)
        is_exception = not isinstance(error, RequestInterrupted)
        reason = f"raised {failure.error}" if is_exception else str(error)
        message = WorkerDied(
            reason=reason, log="", traceback=failure.traceback, exit_code=failure.exit_code, raised=is_exception
        )
        self._events.append(Event(worker=name, message=message))

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Close all workers; idempotent."""
        for worker in self._workers.values():
            worker.close()
        if self._simulating:
            kill_marked_children(self._owner)
        self._simulating.clear()
        self._workers.clear()
        self._deadline.close()
        self._requests.clear()
        self._events.clear()
