"""The launcher seam: start workers, send requests, wait for replies and deaths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, TypeAlias

from pydantic import Field

from embodyrl.config.settings import Says, Settings
from embodyrl.registry import Registry

if TYPE_CHECKING:
    from embodyrl.workers.lifecycle import WorkerSpec
    from embodyrl.workers.messages import Reply, Request


class LauncherSettings(Settings):
    """What every launcher has."""

    name: str = "local"
    """inline: one process, one thread of control; local: supervised processes on this host; ray: a cluster."""


class ProcessSettings(LauncherSettings):
    """A launcher that starts processes."""

    env_workers: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=4096)], Says("auto or an integer of at least 1")
    ] = "auto"
    """Number of env worker processes, or auto: one per core, at most one per slot."""


class ClusterSettings(Settings):
    """Hosts."""

    num_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Hosts."""
    component_placement: dict[str, str | int] = {"env": "all", "rollout": "all", "actor": "all"}
    """Nodes of each component with launcher=ray, for example {env:1-3,rollout:0,actor:0}; 0: the driver's."""


class ClusterSection(Settings):
    """What a launcher on several hosts brings along."""

    cluster: ClusterSettings = ClusterSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    """A worker is gone; its handle must not be used again."""

    reason: str
    """Human-readable: "died with SIGKILL", "gave no answer for 120 s", or the exception."""
    log: str
    """Path of its log, or an empty string."""
    traceback: str = ""
    exit_code: int = 1
    """The exit code its error asks for."""


Message: TypeAlias = "Reply | WorkerDied"
"""A reply of a worker, or its death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A message and who sent it."""

    worker: str
    message: Message


class Launcher(Protocol):
    """Runs workers. Not thread-safe: one driver thread owns it."""

    host: str
    """Address at which workers reach the driver."""

    settings: ClassVar[type[LauncherSettings]]
    """Its keys below `launcher`."""
    section: ClassVar[type[Settings] | None]
    """Further groups of keys that exist with it."""
    in_process: ClassVar[bool]
    """Workers are objects in the driver's process."""

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None: ...

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        """Start (or, after its death, restart) a worker; `WorkerReady` arrives as an event within `timeout_s`."""
        ...

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Send a request; its reply is due within `timeout_s` after the reply to the worker's previous one."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """Return replies and deaths; an empty list when nothing happened in time, or for a second.

        Deadlines count the time in which the driver ran: call this often.
        """
        ...

    def interrupt(self) -> None:
        """Called by the handler of the first signal: cut a wait short that only the interrupted thread can end."""

    def stop(self, *, grace_s: float = 10.0) -> None:
        """End all workers, by force where they do not end by themselves; idempotent."""
        ...


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    group="embodyrl.launchers",
    wants="a class with settings, section, in_process, start, send, wait and stop",
    fits=lambda found: (
        isinstance(found, type)
        and all(hasattr(found, n) for n in ("settings", "section", "in_process", "start", "send", "wait", "stop"))
    ),
)
