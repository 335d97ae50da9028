"""Interface of launchers, which start workers, send requests, and report replies, deaths and missed deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

from pydantic import Field

from embodyrl import parts
from embodyrl.clock import RunClock
from embodyrl.config.settings import Constraint, Index, Seconds, Settings
from embodyrl.errors import WorkerError
from embodyrl.registry import Registry

if TYPE_CHECKING:
    from embodyrl.channels.messages import Reply, Request
    from embodyrl.workers.lifecycle import WorkerSpec


OnVideoError = StrEnum("OnVideoError", ["warn", "stop"])
OnEnvCrash = StrEnum("OnEnvCrash", ["restart", "fail"])
OnNonfinite = StrEnum("OnNonfinite", ["stop", "skip"])


class FaultSettings(Settings):
    """Config keys for failures of workers, videos and updates, and for the time limits of workers."""

    keys_by_condition = {"on_env_crash=restart": "max_restarts_per_worker"}

    step_timeout_s: Seconds = 120.0
    """Time limit in seconds of an env worker per action chunk and per reset of an environment."""
    start_timeout_s: Seconds = 600.0
    """Time limit in seconds for the start of a worker, which imports packages, builds simulators and loads weights."""
    update_timeout_s: Seconds = 3600.0
    """Time limit in seconds for the actor to finish an update, a checkpoint, or log-probabilities."""
    on_env_crash: OnEnvCrash = OnEnvCrash.restart
    """Action when an env worker crashes or a rollout process is killed: restart (its episodes start again), or fail."""
    max_restarts_per_worker: Index = 3
    """Maximum number of restarts of a worker before the run fails with exit code 4; also the maximum number of attempts
    at an episode that crashes its worker."""
    on_video_error: OnVideoError = OnVideoError.warn
    """Action when a video recording fails: warn and continue, or stop."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """Action when an update has non-finite numbers: stop with exit code 5, or skip and count the update."""


class LauncherSettings(Settings):
    """Config keys for every launcher."""

    name: str = "local"
    """inline: one process and thread; local: supervised processes on this host; ray: a Ray cluster."""


class ProcessSettings(LauncherSettings):
    """Config keys for launchers with worker processes."""

    env_workers: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=4096)], Constraint("auto or an integer of at least 1")
    ] = "auto"
    """Number of env worker processes; auto: one per core, at most one per environment."""


class ClusterSettings(Settings):
    """Config keys for runs on several hosts."""

    num_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of hosts."""
    min_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Minimum number of hosts; with fewer hosts, the run saves a checkpoint, if possible, and stops."""
    silence_timeout_s: Seconds = 120.0
    """Time in seconds without connection to the cluster or response of its head node after which workers exit."""
    component_placement: dict[str, str | int] = {"env": "all", "rollout": "all", "actor": "all"}
    """Nodes that run each component with launcher=ray, for example {env:1-3,rollout:0,actor:0}. Nodes are numbers or
    host names; 0 is the driver's host."""

    def problems(self) -> Iterator[str]:
        """Yield an error if `min_nodes` exceeds `num_nodes`."""
        yield from super().problems()
        if self.min_nodes > self.num_nodes:
            yield f"cluster.min_nodes={self.min_nodes} is above cluster.num_nodes={self.num_nodes}; lower min_nodes."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    """Report of the death of a worker."""

    reason: str
    """Human-readable reason: "died with SIGKILL", "did not respond for 120 s", or the exception."""
    log: str
    """Path of the worker's log; empty: no log."""
    traceback: str = ""
    exit_code: int = 1
    """Exit code of the error that ended the worker."""
    raised: bool = False
    """True if the worker raised an exception."""


Message: TypeAlias = "Reply | WorkerDied"
"""Message about a worker: a reply, or the report of its death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A message with the name of its worker."""

    worker: str
    message: Message


COMPONENTS = ("env", "rollout", "actor")
ON_THIS_HOST: Mapping[str, tuple[int, ...]] = dict.fromkeys(COMPONENTS, (0,))


class Launcher(Protocol):
    """Base class of launchers, which run workers. Not thread-safe: only the driver's main thread calls a launcher.

    Attributes and methods that a launcher does not override are those of a launcher of processes on this host.
    """

    host: str = "127.0.0.1"
    """Address at which workers reach the driver."""
    where: str = ""
    """Names of the workers' hosts for messages; empty: all workers are on the driver's host."""
    lost: str = ""
    """Reason why no more workers can be started; empty: workers can be started."""

    settings: ClassVar[type[LauncherSettings]] = ProcessSettings
    """Settings class of the launcher's keys under `launcher`."""
    spans_hosts: ClassVar[bool] = False
    """True if the launcher uses the config section `cluster`, for runs on several hosts."""
    in_process: ClassVar[bool] = False
    """True if workers are objects in the driver's process."""

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None: ...

    @classmethod
    def describe_hosts(cls, cluster: ClusterSettings | None) -> str:
        """Describe the hosts of a run before its start; an empty string: only this host."""
        return ""

    @classmethod
    def nodes(cls, cluster: ClusterSettings | None, *, disaggregated: bool = True) -> Mapping[str, tuple[int, ...]]:
        """Return the host numbers of each component; 0 is the driver's host.

        Unless the placement is `disaggregated`, rollout and actor need the same hosts.

        Raises:
            ConfigError: a component or a host does not exist.
        """
        return ON_THIS_HOST

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        """Start a worker, or restart a dead worker; `WorkerReady` arrives as an event within `timeout_s`."""
        ...

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Send a request; its reply is due `timeout_s` seconds after the reply to the worker's previous request."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them; return an empty list after `timeout_s` or one second without events.

        Deadlines exclude the time in which the driver is suspended, so call this method at least once per second.
        """
        ...

    def interrupt(self) -> None:
        """Interrupt the running request, if possible; called by the handler of the first stop signal.

        If workers run in other processes, only the driver's wait is interrupted, so there is nothing to do.
        """

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop all workers, by force if necessary; idempotent."""
        ...


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    group="embodyrl.launchers",
    parts=parts.LAUNCHERS,
    wants="a subclass of embodyrl.cluster.protocol.Launcher",
    fits=lambda value: isinstance(value, type) and Launcher in value.__mro__,
)


T = TypeVar("T")


def place_rank(number: int, world: int, nodes: Sequence[T]) -> T:
    """Return the node of rank `number`; consecutive ranks share a node, because they exchange shards."""
    return nodes[number * len(nodes) // world]


@dataclass(kw_only=True)
class Handle:
    """State of a running worker: its log, and the time limits of its pending requests."""

    log: Path
    since: float
    """Time at which the time limit of the oldest pending request started."""
    limits: deque[float]
    """Time limits in seconds of the pending requests, oldest first."""

    @property
    def due(self) -> float:
        """Deadline of the oldest pending request."""
        return self.since + self.limits[0] if self.limits else float("inf")


H = TypeVar("H", bound=Handle)


class ProcessLauncher(Launcher, Generic[H]):
    """Base class of launchers with worker processes, which tracks pending requests and their deadlines."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._clock = RunClock()
        self._handles: dict[str, H] = {}
        self._events: deque[Event] = deque()

    def _add_request(self, worker: str, timeout_s: float) -> H:
        """Record a pending request of a worker, and return the worker's handle.

        Raises:
            WorkerError: the worker is not running.
        """
        handle = self._handles.get(worker)
        if handle is None:
            raise WorkerError(f"worker {worker} is not running.")
        if not handle.limits:
            handle.since = self._clock.now()
        handle.limits.append(timeout_s)
        return handle

    def _on_reply(self, handle: H) -> None:
        """Remove the oldest pending request, and start the time limit of the next request."""
        handle.since = self._clock.now()
        if handle.limits:
            handle.limits.popleft()

    def _poll_timeout(self, timeout_s: float) -> float:
        """Return the number of seconds to wait: 0 if there are events, else until the next deadline, at most 1."""
        due = min((handle.due for handle in self._handles.values()), default=float("inf"))
        return 0.0 if self._events else max(0.0, min(timeout_s, due - self._clock.now(), 1.0))

    def _find_late_workers(self) -> list[str]:
        """Return the workers that missed a deadline."""
        return [name for name, handle in self._handles.items() if handle.due <= self._clock.now()]

    def _pop_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    def _report_death(self, name: str, handle: H, reason: str, traceback: str, exit_code: int) -> None:
        """Remove a worker that has exited, and append a `WorkerDied` event."""
        from embodyrl.workers.lifecycle import (
            read_log_tail,
        )  # here, because every command imports a launcher's settings

        died = WorkerDied(
            reason=reason,
            log=str(handle.log),
            traceback=traceback or read_log_tail(handle.log),
            exit_code=exit_code,
            raised=bool(traceback),
        )
        self._events.append(Event(worker=name, message=died))
