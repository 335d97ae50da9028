"""Lifecycle of a worker process: setup, request loop, cleanup."""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from embodyrl.algorithms.settings import AlgorithmSettings
from embodyrl.channels.arena import Arena, ArenaHandle
from embodyrl.channels.channel import PipeChannel
from embodyrl.channels.messages import RankInfo, Reply, Request, WorkerFailed, WorkerReady
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import PARENT_EXITED, ChannelClosed, CheckpointError, EmbodyError
from embodyrl.files import cap_log, describe_full_disk, is_full_disk, read_tail
from embodyrl.learners.settings import ActorSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.process_cleanup import end_children_at_exit, signal_at_parents_end, skip_destructors
from embodyrl.workers.profiling import Profiler

_PR_SET_NAME = 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_FREED_BYTES, _MMAP_THRESHOLD_BYTES = 2**27, 2**25
_IDLE_LIMIT_S = 24 * 3600.0  # longest silence of a driver before it counts as hung; its death is detected immediately


class Worker(Protocol):
    """Interface of workers: objects that execute requests and yield replies."""

    def ready(self) -> WorkerReady:
        """Return the `WorkerReady` message, which is sent after setup."""
        ...

    def handle(self, request: Request) -> Iterable[Reply]:
        """Execute one request; yield its replies."""
        ...

    def close(self) -> None:
        """Free all resources; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInit:
    """Settings with which a worker is created, including the arena handle."""

    arena: ArenaHandle
    bucket_arena: ArenaHandle | None = None
    """Shared memory through which new weights are transferred; None: collocated mode."""
    shared_arena: Arena | None = None
    """The driver's arena object, if the worker runs in the driver's process."""

    def open_arena(self) -> Arena:
        """Attach this process to the arena, and return the arena."""
        return self.shared_arena or Arena.attach(self.arena)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHostInit(WorkerInit):
    """Settings with which a policy process is created. The driver builds them without importing torch."""

    model: ModelSettings
    algorithm: AlgorithmSettings | None = None
    """Algorithm settings; None: inference only, or SFT."""
    longest_episode: int = 1
    """Number of chunks of an episode that reaches the time limit."""
    env: EnvSettings | None = None
    """Settings of the environment that computes rewards of relabeled goals; None: not needed."""
    objective: Any = None
    """Settings of the SFT objective, with `learner`, `needs_reference` and `reference_path`; None: RL."""
    actor: ActorSettings = field(default_factory=ActorSettings)
    gradient_sync: str | None = None
    """Gradient synchronization chosen by the run plan for `actor.fsdp.gradient_sync=auto`."""
    seed: int
    deterministic: bool = False
    skips_nonfinite: bool = False
    request: PolicyRequest
    """Arguments for building the policy, except the device, which the policy process selects."""
    total_steps: int
    """Number of training steps of the run."""
    threads: int
    update_threads: int | None = None
    """Number of threads during updates, in which env workers are idle; None: `threads`."""
    rank_info: RankInfo = field(default_factory=RankInfo)
    acts: bool = True
    single_step: bool = False
    """True if every env step has its own record; a chunk then spans one record per action."""
    trains: bool
    sharded: bool = False
    """True for an inference process in a run whose training processes shard the weights."""
    start_from: str | None = None
    """Folder with weights in the policy's own layout that replace those of `model.path`."""

    @property
    def shards(self) -> bool:
        """True for a training process with a shard of the weights."""
        return self.rank_info.world > 1 or self.actor.fsdp.cpu_offload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Specification of a worker: `entry` is "module:callable", called with `init`."""

    name: str
    entry: str
    init: WorkerInit
    component: str = "actor"
    """Component of the worker: env, rollout or actor, as in `cluster.component_placement`."""
    environ: dict[str, str] = field(default_factory=dict)
    gpu: str | None = None
    """Visible GPU of the process; an empty string: no GPU; None: the driver's GPUs."""

    @property
    def simulates(self) -> bool:
        """True for env workers, whose environments may start processes."""
        return self.component == "env"

    def build(self) -> Worker:
        """Import the entry and build the worker in this process."""
        return resolve_name(self.entry)(self.init)


def describe_failure(error: BaseException) -> WorkerFailed:
    """Return the `WorkerFailed` message about an exception."""
    text = str(error) if isinstance(error, EmbodyError) else f"{type(error).__name__}: {error}"
    text += "".join(f" [{note}]" for note in getattr(error, "__notes__", ()) if note not in text)
    code = error.exit_code if isinstance(error, EmbodyError) else 1
    if is_full_disk(error):
        text, code = describe_full_disk(error), CheckpointError.exit_code
    return WorkerFailed(error=text, traceback=traceback.format_exc(), exit_code=code)


def worker_main(connection: Connection, spec: WorkerSpec, log: Path) -> None:
    """Run a worker; entry point of a spawned process."""
    channel = PipeChannel(connection)
    worker: Worker | None = None
    profiler = Profiler(spec.name, log.parent)
    code = 0
    try:
        _set_up_process(spec, log)
        worker = spec.build()
        channel.put(worker.ready())
        while (request := channel.get(_IDLE_LIMIT_S)) is not None:
            profiler.update()
            for reply in worker.handle(request):
                channel.put(reply)
            cap_log(log)
    except ChannelClosed:
        pass  # the driver is dead: no process to report to
    except BaseException as error:  # process boundary: report every error, then exit
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        try:
            # Reported before exiting: an exit code does not contain the cause.
            channel.put(describe_failure(error))
        except ChannelClosed:
            pass
        code = 1
    # Destructors of renderers print errors; everything is saved.
    skip_destructors(code)
    try:
        profiler.close()
        if worker is not None:
            worker.close()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _set_up_process(spec: WorkerSpec, log: Path) -> None:
    end_children_at_exit()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
    # Ctrl-C, SIGTERM of a batch system and SIGHUP reach every process of the run. Only the driver handles them; it
    # needs the workers to save a checkpoint.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, PARENT_EXITED):
        signal.signal(signum, signal.SIG_IGN)
    if spec.simulates:
        ignore_sigterm_except_in_children()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # The launcher's process ends its daemons when it exits; an environment in this process may start processes as well.
    multiprocessing.current_process().daemon = False
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"embodyrl:{spec.name}"[:15].encode(), 0, 0, 0)
    # Two checks for the driver's death: the kernel's also kills a worker that is stuck in C with the interpreter lock.
    signal_at_parents_end(signal.SIGKILL)
    keep_freed_memory()
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()


def ignore_sigterm_except_in_children() -> None:
    """Ignore SIGTERM in this process, but not in child processes, which an environment may end with SIGTERM."""
    signal.signal(signal.SIGTERM, lambda signum, frame: None)  # children would inherit SIG_IGN
    signal.siginterrupt(signal.SIGTERM, False)

    def restore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        allow()

    # A signal that reaches a child before its first instruction stays pending until the default action is restored.
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    allow = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.register_at_fork(before=block, after_in_parent=allow, after_in_child=restore)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, up to a limit, instead of returning it to the system.

    By default glibc returns freed memory, and the kernel must zero each page before its next use, which takes time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MAX_FREED_BYTES)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def read_log_tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a worker's log."""
    if not path.exists():
        return ""
    text = read_tail(path, 8192).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
