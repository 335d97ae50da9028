"""The life of a worker process: set-up, the request loop, and an end that leaves nothing behind."""

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from embodyrl.algorithms.settings import AlgorithmSettings
from embodyrl.channels.arena import Arena, ArenaHandle
from embodyrl.channels.channel import PipeChannel
from embodyrl.channels.messages import RankInfo, Reply, Request, WorkerFailed, WorkerReady
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import PARENT_EXITED, ChannelClosed, EmbodyError
from embodyrl.files import cap_log
from embodyrl.learners.settings import ActorSettings, ObjectiveSettings
from embodyrl.leftovers import end_children, signal_at_parents_end
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings

_PR_SET_NAME = 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGE_BYTES = 2**27, 2**25
_IDLE_LIMIT_S = 24 * 3600.0  # a driver that is silent for a day is hung; its own death is noticed at once


class Worker(Protocol):
    """What runs in a worker process: requests in, replies out."""

    def ready(self) -> WorkerReady:
        """Introduce the worker to the driver."""
        ...

    def handle(self, request: Request) -> Iterable[Reply]:
        """Carry out one request; yield its replies."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInit:
    """What every worker needs to start: where the records lie that it shares with the others."""

    arena: ArenaHandle
    bucket_arena: ArenaHandle | None = None
    """Where rollout and actor are apart: buckets for new weights."""
    shared_arena: Arena | None = None
    """The arena itself, where the worker lives in the process that has opened it."""

    def open_arena(self) -> Arena:
        """The arena, as this process sees it."""
        return self.shared_arena or Arena.attach(self.arena)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHostInit(WorkerInit):
    """What the process that holds the policy needs to start. The driver, which writes this, loads no torch."""

    model: ModelSettings
    algorithm: AlgorithmSettings | None = None
    """None: nothing is trained, or by supervision."""
    longest_episode: int = 1
    """Chunks of an episode that its time limit ends."""
    env: EnvSettings | None = None
    """The environment that says what other goals would have earned, where the algorithm asks."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """Of supervised training."""
    critic: str | None = None
    """Folder of a critic apart."""
    actor: ActorSettings = field(default_factory=ActorSettings)
    gradient_sync: str | None = None
    """The choice of the run plan where `actor.fsdp.gradient_sync=auto`."""
    seed: int
    deterministic: bool = False
    skips_nonfinite: bool = False
    request: PolicyRequest
    """Its device is chosen where the policy is built."""
    total_steps: int
    """Training steps of the whole run."""
    threads: int
    rank_info: RankInfo = field(default_factory=RankInfo)
    acts: bool = True
    single_step: bool = False
    """Every env step is a record, and a chunk takes as many of them as it has actions."""
    trains: bool
    sharded: bool = False
    """Of a process that only acts: those that train shard the weights."""
    start_from: str | None = None
    """Folder of weights in the policy's own layout that replace those of `model.path`."""

    @property
    def shards(self) -> bool:
        """A process that trains holds parts of the weights."""
        return self.rank_info.world > 1 or self.actor.fsdp.cpu_offload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How to build a worker: `entry` is "module:callable", called with `init`."""

    name: str
    entry: str
    init: WorkerInit
    component: str = "actor"
    """env, rollout or actor, as in `cluster.component_placement`."""
    environ: dict[str, str] = field(default_factory=dict)
    gpu: str | None = None
    """The one GPU of this host that it sees; an empty string: none; None: as many as the driver sees."""

    @property
    def restartable(self) -> bool:
        """Only simulators start anew."""
        return self.component == "env"

    def build(self) -> Worker:
        """Import and make it, in the process where it is to live."""
        module, _, attribute = self.entry.partition(":")
        return getattr(importlib.import_module(module), attribute)(self.init)


def describe_failure(error: BaseException) -> WorkerFailed:
    """Turn an exception into the message that reports it."""
    text = str(error) if isinstance(error, EmbodyError) else f"{type(error).__name__}: {error}"
    text += "".join(f" [{note}]" for note in getattr(error, "__notes__", ()) if note not in text)
    code = error.exit_code if isinstance(error, EmbodyError) else 1
    return WorkerFailed(error=text, traceback=traceback.format_exc(), exit_code=code)


def worker_main(connection: Connection, spec: WorkerSpec, log_path: str | None) -> None:
    """Entry of a spawned process."""
    _set_up_process(spec, log_path)
    channel = PipeChannel(connection)
    worker: Worker | None = None
    try:
        worker = spec.build()
        channel.put(worker.ready())
        while (request := channel.get(_IDLE_LIMIT_S)) is not None:
            for reply in worker.handle(request):
                channel.put(reply)
            if log_path is not None:
                cap_log(Path(log_path))
    except ChannelClosed:
        pass  # the driver is gone: nobody is left to tell
    except BaseException as error:  # process boundary: everything is reported, then the process ends
        traceback.print_exc()
        try:
            # Before the process ends: its exit code alone says nothing of the cause.
            channel.put(describe_failure(error))
        except ChannelClosed:
            pass
        _leave(worker, 1)
    _leave(worker, 0)


def _leave(worker: Worker | None, code: int) -> None:
    try:
        if worker is not None:
            worker.close()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        end_children()
        # Renderers print errors from destructors at interpreter exit; everything worth saving is saved.
        os._exit(code)


def _set_up_process(spec: WorkerSpec, log_path: str | None) -> None:
    os.environ.update(spec.environ)
    if log_path is not None:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
        sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
    # Ctrl-C, a batch system's SIGTERM and a lost terminal reach every process of the run; only the driver decides what
    # they mean, and it needs the workers to save a checkpoint.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, PARENT_EXITED):
        signal.signal(signum, signal.SIG_IGN)
    if spec.restartable:
        # Processes that an environment starts would inherit SIG_IGN, and its close() ends them with SIGTERM.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        signal.siginterrupt(signal.SIGTERM, False)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # The launcher's process ends its daemons when it exits; an environment in this process may start processes as well.
    multiprocessing.current_process().daemon = False
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"embodyrl:{spec.name}"[:15].encode(), 0, 0, 0)
    # Two watches on the driver: the kernel's also reaches a worker that is stuck in C with the interpreter lock held.
    signal_at_parents_end(signal.SIGKILL)
    keep_freed_memory()
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()


def keep_freed_memory() -> None:
    """Memory that is freed and wanted again in every layer and every frame stays with the process, up to a limit.

    By default glibc gives it back, and the system clears each page anew: a tenth of an update's time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def log_tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a worker's log."""
    if not path.exists():
        return ""
    text = path.read_bytes()[-8192:].decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
