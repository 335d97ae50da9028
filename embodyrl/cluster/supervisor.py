"""Supervision of all workers: delivery of replies to callbacks, and restarts after worker deaths."""

import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress

from embodyrl.channels.messages import Done, EnvReport, Request, WorkerReady
from embodyrl.cluster.protocol import FaultSettings, Launcher, Message, OnEnvCrash, WorkerDied
from embodyrl.cluster.timeline import Timeline
from embodyrl.errors import (
    PARENT_EXITED,
    CheckpointError,
    ClusterLost,
    EmbodyError,
    Interrupted,
    NonFiniteError,
    StoppedImmediately,
    WorkerError,
)
from embodyrl.process_cleanup import install_signal_handlers
from embodyrl.workers.lifecycle import WorkerSpec


class StopRequest:
    """Stop signals of a run, stored until the loop reaches a point at which the run can stop."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._stop_requested = False
        """True after the first stop signal; the next signal stops the process immediately."""
        self._status_requested = False

    def pop_status_request(self) -> bool:
        """Return True if SIGUSR1 arrived since the last call."""
        requested, self._status_requested = self._status_requested, False
        return requested

    def check(self) -> None:
        """Raise `Interrupted` if a stop signal has arrived; call between steps.

        Raises:
            Interrupted: a signal arrived.
        """
        if self._signum is not None:
            raise Interrupted(self._signum)

    @contextmanager
    def handle_signals(
        self, on_first: Callable[[], None] = lambda: None, on_second: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP as stop requests; a second signal calls `on_second` and exits immediately.

        With nohup, SIGHUP stays ignored. `PARENT_EXITED` is a stop request too, but never counts as a second signal.
        SIGUSR1 is stored for `pop_status_request`.
        """

        def handle_stop(signum: int, frame: object) -> None:
            # A closed terminal is a request to terminate.
            effective_signum = signum if signum == signal.SIGINT else signal.SIGTERM
            if signum != PARENT_EXITED:
                if self._stop_requested:
                    on_second()
                    raise StoppedImmediately(effective_signum)
                self._stop_requested = True
            if self._signum is None:
                self._signum = effective_signum
                on_first()

        def handle_status(signum: int, frame: object) -> None:
            self._status_requested = True

        stop_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, PARENT_EXITED)
        with install_signal_handlers({signal.SIGUSR1: handle_status, **dict.fromkeys(stop_signals, handle_stop)}):
            yield


Callback = Callable[[Message], None]

_BACKOFF_S = 0.5


class Supervisor:
    """Supervisor of all workers, which also sends their requests; used only in the driver's main thread."""

    def __init__(
        self,
        launcher: Launcher,
        faults: FaultSettings,
        log: Callable[[str], None],
        timeline: Timeline | None = None,
    ) -> None:
        self._launcher = launcher
        self._faults = faults
        self.log = log
        self._timeline = timeline
        self._pending: dict[str, deque[tuple[Request, float]]] = defaultdict(deque)
        """Pending requests of each worker with their send times, oldest first."""
        self._specs: dict[str, WorkerSpec] = {}
        self._callbacks: dict[str, Callback] = {}
        self.starting: set[str] = set()
        """Names of workers that are starting, or dead and waiting for a restart."""
        self._restarts: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self.get_running_episodes: Callable[[str], Set[Hashable]] = lambda worker: frozenset()
        """Function that returns the running episodes of an env worker with their steps; set by the scheduler."""
        self._failures: dict[str, set[Hashable]] = defaultdict(set)
        """Exceptions of each env worker with the running episodes and their steps."""
        self._stop = StopRequest()
        self._defers_signals = False
        self._deferred: WorkerError | None = None
        """Error of an env worker during an update or checkpoint, raised afterwards."""
        if launcher.where:
            log(launcher.where)

    @property
    def restarts(self) -> int:
        """Number of worker restarts since the start of this process."""
        return sum(self._restarts.values())

    def start(self, specs: dict[str, tuple[WorkerSpec, Callback]]) -> None:
        """Start workers in parallel; they are ready once `starting` is empty.

        Raises:
            Interrupted: the run received a stop signal; the remaining workers are not started.
        """
        for name, (spec, callback) in specs.items():
            self._check_stop()  # with launcher=inline, each start takes as long as building a simulator
            self._specs[name] = spec
            self._callbacks[name] = callback
            self.starting.add(name)
            self._launcher.start(spec, timeout_s=self._faults.start_timeout_s)

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Send a request; `pump` passes its reply to the worker's callback."""
        self._pending[worker].append((request, time.monotonic()))
        if self._timeline is not None:
            self._timeline.on_request(worker, request)
        self._launcher.send(worker, request, timeout_s=timeout_s)

    def pump(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for events and pass them to the callbacks.

        Raises:
            Interrupted: the run received a stop signal.
            WorkerError: a worker died and is not restarted, or its restarts are used up.
        """
        self._check_stop()
        if self._stop.pop_status_request():
            status = ", ".join(f"{name} {self._describe_request(name)}" for name in self._specs)
            self.log(f"SIGUSR1: {status}; {self.restarts} restarts")
        now = time.monotonic()
        for name in [n for n, due in self._restart_at.items() if due <= now]:
            del self._restart_at[name]
            self._launcher.start(self._specs[name], timeout_s=self._faults.start_timeout_s)
        if self._restart_at:
            timeout_s = max(0.0, min(timeout_s, min(self._restart_at.values()) - now))
        # Replies before deaths: a signal to the process group may also have killed a starting worker, and the signal is
        # the cause to report.
        for event in sorted(self._launcher.wait(timeout_s), key=lambda e: isinstance(e.message, WorkerDied)):
            if isinstance(event.message, WorkerDied):
                self._check_stop()
                self._pending[event.worker].clear()
                if self._timeline is not None:
                    self._timeline.on_death(event.worker)
                self._on_worker_death(event.worker, event.message)
            elif isinstance(event.message, WorkerReady):
                self.starting.discard(event.worker)
            else:
                if isinstance(event.message, Done | EnvReport) and self._pending[event.worker]:
                    self._pending[event.worker].popleft()
                if self._timeline is not None:
                    self._timeline.on_reply(event.worker, event.message)
            self._callbacks[event.worker](event.message)

    def _describe_request(self, worker: str) -> str:
        """Describe the current request of a worker and its duration."""
        if worker in self.starting:
            return "starting"
        for request, sent in self._pending[worker]:
            return f"{request.label} since {time.monotonic() - sent:.1f} s"
        return "idle"

    def _check_stop(self) -> None:
        if not self._defers_signals:
            self._stop.check()
            if self._launcher.lost:
                raise ClusterLost(self._launcher.lost)
            if self._deferred is not None:
                deferred, self._deferred = self._deferred, None
                raise deferred

    def _on_worker_death(self, name: str, died: WorkerDied) -> None:
        """Schedule a restart, or raise the error that ends the run; during an update, after the update."""
        spec = self._specs[name]
        try:
            self._restart(name, spec, died)
        except WorkerError as error:
            error.actors_reply = spec.simulates or (spec.component == "rollout" and not self._defers_signals)
            if not (spec.simulates and self._defers_signals):
                raise
            self._deferred = error
            self.starting.add(name)  # so that the worker gets no requests

    def _restart(self, name: str, spec: WorkerSpec, died: WorkerDied) -> None:
        where, reason = f" Log: {died.log}" if died.log else "", died.reason.removesuffix(".")
        # A worker that was never ready will fail again, for example because a package is missing.
        never_ready = name in self.starting and self._restarts.get(name, 0) == 0
        # Only the ranks contain the training state. The error of a rollout process would occur again.
        final = spec.component == "actor" or (spec.component == "rollout" and died.raised)
        final |= died.exit_code == CheckpointError.exit_code  # a full disk
        if final or never_ready or self._faults.on_env_crash == OnEnvCrash.fail:
            raise _build_worker_error(f"worker {name} {reason}.{where}", died)
        count = self._restarts.get(name, 0)
        if count >= self._faults.max_restarts_per_worker:
            raise WorkerError(
                f"worker {name} {reason}; it was restarted {count} times already "
                f"(faults.max_restarts_per_worker).{where}\n{died.traceback}"
            )
        if spec.simulates and died.raised:
            # After a restart, an episode may run in another environment.
            what = re.sub(r"\benvironment \d+", "", died.reason)
            failures = {(what, steps) for steps in self.get_running_episodes(name)}
            if self._failures[name] & failures:
                raise WorkerError(
                    f"worker {name} {reason}; after its last restart it failed in the same step of the same episode "
                    f"again, so it is not restarted. Check the environment with `embodyrl check-env`.{where}\n"
                    f"{died.traceback}"
                )
            self._failures[name] |= failures
        # The first restart is immediate, because most deaths do not repeat; then after 0.5, 1, 2 ... s, at most 8 s.
        delay = 0.0 if count == 0 else _BACKOFF_S * 2 ** min(count - 1, 4)
        self._restarts[name] = count + 1
        self.starting.add(name)
        what = "episodes" if spec.simulates else "requests"
        self._restart_at[name] = time.monotonic() + delay
        self.log(
            f"worker {name} {reason}; restarting it ({count + 1} of "
            f"{self._faults.max_restarts_per_worker}); its running {what} start again.{where}"
        )

    def handle_signals(self) -> AbstractContextManager[None]:
        """Raise `Interrupted` at the next safe point after a signal; a second signal ends the workers immediately."""
        return self._stop.handle_signals(self._on_stop_signal, on_second=lambda: self._launcher.stop(grace_s=0.0))

    def _on_stop_signal(self) -> None:
        if self._defers_signals:
            # The handler may have interrupted the writing of another line.
            with suppress(RuntimeError):
                self.log("stopping after the current update or checkpoint; a second signal stops immediately")
        self._launcher.interrupt()

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Finish the block (an update, a checkpoint) before a signal takes effect."""
        previous, self._defers_signals = self._defers_signals, True
        try:
            yield
        finally:
            self._defers_signals = previous

    def stop(self) -> None:
        """Stop all workers, and then write the trace of their requests."""
        self._launcher.stop()
        if self._timeline is not None:
            self._timeline.close()


def _build_worker_error(text: str, died: WorkerDied) -> EmbodyError:
    """Return the error that ends the run after a worker's death, with the exit code of the worker's error."""
    if died.exit_code == NonFiniteError.exit_code:
        return NonFiniteError(died.reason.removeprefix("raised "))
    if died.exit_code == EmbodyError.exit_code:
        return WorkerError(f"{text}\n{died.traceback}".rstrip())
    # The text contains the cause; the log has the traceback.
    error = WorkerError(text)
    error.exit_code = died.exit_code
    return error
