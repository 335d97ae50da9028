"""Launcher of worker processes on this host, supervised through pipes and process sentinels."""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.channels.channel import PipeChannel
from embodyrl.cluster.protocol import ClusterSettings, Event, Handle, ProcessLauncher
from embodyrl.errors import ChannelClosed, ChannelTimeout
from embodyrl.process_cleanup import get_signal_name, kill_marked_children, mark_children, set_environ

if TYPE_CHECKING:
    from embodyrl.channels.messages import Request
    from embodyrl.workers.lifecycle import WorkerSpec

_STACK_DUMP_S = 2.0  # time for the stack dump of a hung worker before it is killed
_JOIN_S = 60.0  # on a busy machine, a killed process needs many seconds to free gigabytes
_GUARD = re.compile(rb"^\s*if\s+__name__\s*==", re.MULTILINE)


@dataclass(kw_only=True)
class _Handle(Handle):
    process: BaseProcess
    channel: PipeChannel
    ready: bool = False

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.channel.connection.fileno(), self.process.sentinel


class LocalLauncher(ProcessLauncher[_Handle]):
    """Launcher of worker processes on this host, which detects deaths and missed deadlines within milliseconds."""

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None:
        super().__init__(log_dir)
        self._context = multiprocessing.get_context("spawn")
        self._owner = f"workers {secrets.token_hex(8)}"
        # One persistent selector: `multiprocessing.connection.wait` registers all files at each call.
        self._poll = select.poll()
        self._workers_by_descriptor: dict[int, str] = {}
        """Worker name by file descriptor, for each pipe and process sentinel."""

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        """Start a worker process with its own log file and pipe."""
        from embodyrl.workers.lifecycle import worker_main  # here, because every command imports this class's settings

        assert spec.name not in self._handles, f"worker {spec.name} is already running"
        if spec.gpu is not None:
            spec = replace(spec, environ=spec.environ | {"CUDA_VISIBLE_DEVICES": spec.gpu})
        log = self._log_dir / f"{spec.name}.log"
        driver_end, worker_end = self._context.Pipe()
        process = self._context.Process(
            target=worker_main, args=(worker_end, spec, log), name=f"embodyrl:{spec.name}", daemon=True
        )
        # The resource tracker unblocks SIGINT when it starts, so start it first.
        resource_tracker.ensure_running()
        # The child inherits the mask: Ctrl-C during its imports would print a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Libraries of the child read the variables at import, before our code runs.
            with _guard_main_module(), mark_children(f"{self._owner}/{spec.name}"), set_environ(spec.environ):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Close our copy; otherwise the pipe would stay open after the child's exit.
        worker_end.close()
        channel, limits = PipeChannel(driver_end), deque([timeout_s])
        handle = _Handle(process=process, channel=channel, log=log, since=self._clock.now(), limits=limits)
        self._handles[spec.name] = handle
        for descriptor in handle.descriptors:
            self._workers_by_descriptor[descriptor] = spec.name
            self._poll.register(descriptor, select.POLLIN)

    def send(self, worker: str, request: Request, *, timeout_s: float) -> None:
        """Send a request through the worker's pipe."""
        # Also for a broken pipe: the death that `wait` reports answers this request.
        handle = self._add_request(worker, timeout_s)
        try:
            # A long message may block while the reader is busy, so use the deadline of its current request.
            handle.channel.put(request, handle.due - self._clock.now())
        except ChannelTimeout:
            self._kill_hung_worker(worker)
        except ChannelClosed:
            pass  # the sentinel reports the death with its reason at the next wait
        else:
            if handle.channel.arrived:  # already read, so the pipe is not ready again
                self._drain(worker)

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for events, and return replies, deaths and missed deadlines."""
        ready = self._poll.poll(self._poll_timeout(timeout_s) * 1000)
        for name in sorted({self._workers_by_descriptor[descriptor] for descriptor, _ in ready}):
            self._drain(name)
        for name in self._find_late_workers():
            self._kill_hung_worker(name)
        # Last, because the error may be a consequence of the other deaths: ranks wait for each other.
        return sorted(self._pop_events(), key=lambda event: getattr(event.message, "raised", False))

    def _drain(self, name: str) -> None:
        """Receive all replies of a worker, then check whether the worker is alive."""
        from embodyrl.channels.messages import WorkerFailed

        handle = self._handles[name]
        while True:
            try:
                message = handle.channel.get(0.0)
            except (ChannelTimeout, ChannelClosed, OSError):
                break
            if isinstance(message, WorkerFailed):
                self._remove_worker(name, f"raised {message.error}", message.traceback, message.exit_code)
                return
            handle.ready = True
            self._on_reply(handle)
            self._events.append(Event(worker=name, message=message))
        if not handle.process.is_alive():
            self._remove_worker(name, _describe_exit(handle.process.exitcode))

    def _kill_hung_worker(self, name: str) -> None:
        """Kill a worker that missed its deadline, after a stack dump to the worker's log."""
        handle = self._handles[name]
        limit = handle.limits[0]
        pid = handle.process.pid
        assert pid is not None
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            pass  # the process has just died and is reaped below
        handle.process.join(_STACK_DUMP_S)
        self._remove_worker(name, f"did not respond for {limit:g} s (stack dump in its log)")

    def _remove_worker(self, name: str, reason: str, traceback: str = "", exit_code: int = 1) -> None:
        handle = self._handles.pop(name)
        handle.process.kill()
        handle.process.join(_JOIN_S)
        kill_marked_children(f"{self._owner}/{name}")
        self._unregister(handle)
        self._report_death(name, handle, reason, traceback, exit_code)

    def _unregister(self, handle: _Handle) -> None:
        for descriptor in handle.descriptors:
            self._poll.unregister(descriptor)
            del self._workers_by_descriptor[descriptor]
        handle.channel.close()

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop all workers; kill processes that do not exit within `grace_s` seconds."""
        handles = list(self._handles.values())
        self._handles.clear()
        self._events.clear()
        deadline = time.monotonic() + grace_s
        try:
            for handle in handles:
                try:
                    handle.channel.put(None, 0.0)
                except (ChannelClosed, ChannelTimeout):
                    pass  # already dead, or too busy to receive
            for handle in handles:
                if not handle.ready:
                    handle.process.kill()  # still importing: nothing to close yet
                handle.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            # Also after a second Ctrl-C: workers ignore SIGINT and SIGTERM.
            for handle in handles:
                handle.process.kill()
            for handle in handles:
                handle.process.join(_JOIN_S)
                self._unregister(handle)
            if handles:
                kill_marked_children(self._owner)


@contextmanager
def _guard_main_module() -> Iterator[None]:
    """Keep a script without `if __name__ == "__main__":` from running again in each new process.

    A spawned process runs the main script first to define its names. Without the guard, the script would start training
    again in every worker.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file() or _GUARD.search(Path(file).read_bytes()):
        yield
        return
    spec, main.__spec__ = main.__spec__, None
    del main.__file__
    try:
        yield
    finally:
        main.__spec__, main.__file__ = spec, file


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        name = get_signal_name(-code)
        hint = " (the kernel may have killed the process because memory was full)" if name == "SIGKILL" else ""
        return f"died with {name}{hint}"
    return f"exited with code {code}"
