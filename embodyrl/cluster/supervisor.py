"""All workers of a run behind one wait: replies go to their callbacks, deaths to the restart policy."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from embodyrl.channels.messages import Request, WorkerReady
from embodyrl.cluster.protocol import FaultSettings, Launcher, Message, OnEnvCrash, WorkerDied
from embodyrl.cluster.timeline import Timeline
from embodyrl.errors import (
    PARENT_EXITED,
    ClusterLost,
    EmbodyError,
    Interrupted,
    NonFiniteError,
    StoppedAtOnce,
    WorkerError,
)
from embodyrl.workers.lifecycle import WorkerSpec


class StopRequest:
    """Remembers a signal until the loop reaches a point where it can stop."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._asked = False
        """By a signal of which another one would be the second."""
        self._looked = False

    def looked(self) -> bool:
        """Whether SIGUSR1 has asked for the state since the last call."""
        looked, self._looked = self._looked, False
        return looked

    def check(self) -> None:
        """Call between steps.

        Raises:
            Interrupted: a signal arrived.
        """
        if self._signum is not None:
            raise Interrupted(self._signum)

    @contextmanager
    def listening(
        self, on_first: Callable[[], None] = lambda: None, on_second: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP as requests; a second one acts at once, after `on_second`.

        SIGHUP stays ignored where it is (nohup). `PARENT_EXITED` is a request too, but never a second one. SIGUSR1 is
        remembered for `looked`.
        """

        def note(signum: int, frame: object) -> None:
            # A lost terminal means the same as a request to terminate.
            meant = signum if signum == signal.SIGINT else signal.SIGTERM
            if signum != PARENT_EXITED:
                if self._asked:
                    on_second()
                    raise StoppedAtOnce(meant)
                self._asked = True
            if self._signum is None:
                self._signum = meant
                on_first()

        def look(signum: int, frame: object) -> None:
            self._looked = True

        wanted = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGHUP: note, PARENT_EXITED: note}
        wanted |= {signal.SIGUSR1: look}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del wanted[signal.SIGHUP]
        previous = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


Callback = Callable[[Message], None]

_BACKOFF_S = 0.5


class Supervisor:
    """Start, feed and supervise the workers; only the driver thread uses it."""

    def __init__(
        self, launcher: Launcher, faults: FaultSettings, say: Callable[[str], None], timeline: Timeline
    ) -> None:
        self._launcher = launcher
        self._faults = faults
        self.say = say
        self.timeline = timeline
        self._specs: dict[str, WorkerSpec] = {}
        self._callbacks: dict[str, Callback] = {}
        self.starting: set[str] = set()
        """Workers that are not ready yet, or died and will be restarted."""
        self._restarts: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        """How each worker ended last."""
        self._stop = StopRequest()
        self._shielded = False
        if launcher.where:
            say(launcher.where)

    @property
    def restarts(self) -> int:
        """Restarts since the run began."""
        return sum(self._restarts.values())

    def start(self, specs: dict[str, tuple[WorkerSpec, Callback]]) -> None:
        """Start workers side by side; they are ready once `starting` is empty."""
        for name, (spec, callback) in specs.items():
            self._specs[name] = spec
            self._callbacks[name] = callback
            self.starting.add(name)
            self._launcher.start(spec, timeout_s=self._faults.start_timeout_s)

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Send a request; its reply reaches the worker's callback from `pump`."""
        self.timeline.sent(worker, request)
        self._launcher.send(worker, request, timeout_s=timeout_s)

    def pump(self, timeout_s: float) -> None:
        """Wait for news at most `timeout_s` and hand it out.

        Raises:
            Interrupted: a signal asked the run to stop.
            WorkerError: a worker died that is not restarted, or its budget is used up.
        """
        self._check_stop()
        if self._stop.looked():
            doing = (f"{n} {'starting' if n in self.starting else self.timeline.waiting_for(n)}" for n in self._specs)
            self.say(f"SIGUSR1: {', '.join(doing)}; {self.restarts} restarts")
        now = time.monotonic()
        for name in [n for n, due in self._restart_at.items() if due <= now]:
            del self._restart_at[name]
            self._launcher.start(self._specs[name], timeout_s=self._faults.start_timeout_s)
        if self._restart_at:
            timeout_s = max(0.0, min(timeout_s, min(self._restart_at.values()) - now))
        # Replies before deaths: a signal to the whole group may have killed a worker that was just being born, and then
        # the signal is the story, not the death.
        for event in sorted(self._launcher.wait(timeout_s), key=lambda e: isinstance(e.message, WorkerDied)):
            if isinstance(event.message, WorkerDied):
                self._check_stop()
                self.timeline.died(event.worker)
                self._on_worker_death(event.worker, event.message)
            elif isinstance(event.message, WorkerReady):
                self.starting.discard(event.worker)
            else:
                self.timeline.answered(event.worker, event.message)
            self._callbacks[event.worker](event.message)

    def _check_stop(self) -> None:
        if not self._shielded:
            self._stop.check()
            if self._launcher.lost:
                raise ClusterLost(self._launcher.lost)

    def _on_worker_death(self, name: str, died: WorkerDied) -> None:
        """Plan a restart, or raise what ends the run."""
        spec = self._specs[name]
        where, reason = f" Log: {died.log}" if died.log else "", died.reason.removesuffix(".")
        # What has never worked will not work the second time: a missing package, a scene that does not load.
        never_ready = name in self.starting and self._restarts.get(name, 0) == 0
        if not spec.restartable or never_ready or self._faults.on_env_crash == OnEnvCrash.fail:
            raise _worker_error(f"worker {name} {reason}.{where}", died)
        count = self._restarts.get(name, 0)
        if count >= self._faults.max_restarts_per_worker:
            raise WorkerError(
                f"worker {name} {reason}; it was restarted {count} times already "
                f"(faults.max_restarts_per_worker).{where}\n{died.traceback}"
            )
        if died.traceback and self._failures.get(name) == died.reason:
            raise WorkerError(
                f"worker {name} {reason}, again after a restart and in the same step: another restart would end the "
                f"same way. Find the defect with `embodyrl check-env`.{where}\n{died.traceback}"
            )
        self._failures[name] = died.reason
        # The first restart at once, as most deaths are accidents; then 0.5, 1, 2 ... s, at most 8.
        delay = 0.0 if count == 0 else _BACKOFF_S * 2 ** min(count - 1, 4)
        self._restarts[name] = count + 1
        self.starting.add(name)
        self._restart_at[name] = time.monotonic() + delay
        self.say(
            f"worker {name} {reason}; restarting it ({count + 1} of "
            f"{self._faults.max_restarts_per_worker}), its running episodes are played again.{where}"
        )

    def signals(self) -> AbstractContextManager[None]:
        """Turn signals into `Interrupted` at the next safe point; a second one ends the workers at once."""
        return self._stop.listening(self._noted, on_second=lambda: self._launcher.stop(grace_s=0.0))

    def _noted(self) -> None:
        if self._shielded:
            # The handler may have cut into the writing of another line.
            with suppress(RuntimeError):
                self.say("stopping as soon as what runs now (an update, a checkpoint) is done; once more ends at once")
        self._launcher.interrupt()

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Finish what is inside (an update, a checkpoint) before a signal takes effect."""
        previous, self._shielded = self._shielded, True
        try:
            yield
        finally:
            self._shielded = previous

    def stop(self) -> None:
        """End all workers."""
        self._launcher.stop()


def _worker_error(text: str, died: WorkerDied) -> EmbodyError:
    """The error that ends the run, with the exit code the worker's own error asked for."""
    if died.exit_code == NonFiniteError.exit_code:
        return NonFiniteError(died.reason.removeprefix("raised "))
    if died.exit_code == EmbodyError.exit_code:
        return WorkerError(f"{text}\n{died.traceback}".rstrip())
    # It names its cause; the log has the traceback.
    error = WorkerError(text)
    error.exit_code = died.exit_code
    return error
