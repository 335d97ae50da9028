"""Launchers with real processes and signals: workers that reply, die, hang or fail."""

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from processes import workers_of

from embodyrl.channels.messages import WorkerReady
from embodyrl.cluster.inline import InlineLauncher
from embodyrl.cluster.local import LocalLauncher
from embodyrl.cluster.protocol import WorkerDied
from embodyrl.errors import EnvError
from embodyrl.workers.lifecycle import WorkerSpec


class EchoWorker:
    """Worker that replies to messages; some messages make the worker fail."""

    def __init__(self, init: str) -> None:
        if init == "fail":
            raise EnvError("no simulator here")
        self.number = len(init)

    def ready(self) -> WorkerReady:
        return WorkerReady(task_limit=self.number)

    def handle(self, request: str) -> Iterator[str]:
        if request == "raise":
            raise EnvError("environment 3 returned NaN")
        if request == "sys.exit":
            raise SystemExit
        if request == "exit":
            os._exit(7)
        if request == "hang":
            time.sleep(3600)
        if request == "leave":
            request = " ".join(self.leave())
        yield f"{request}!" if request != "long" else "x" * 2**22

    def leave(self) -> list[str]:
        """Create the files and processes that a library may leave behind; return the files and the process ids."""
        # Else the folder is that of the test process, which keeps it, if an earlier test has created one.
        multiprocessing.current_process()._config.pop("tempdir", None)
        self.lock = multiprocessing.RLock()
        self.shared = multiprocessing.Manager()
        self.pool = multiprocessing.Pool(1)
        server = multiprocessing.get_context("forkserver")
        children = [one.Process(target=time.sleep, args=(3600,)) for one in (multiprocessing, server)]
        for child in children:
            child.start()
        threading.Thread(target=threading.Event().wait).start()
        semaphore, folder = self.lock._semlock.name.removeprefix("/"), multiprocessing.util.get_temp_dir()
        files = [f"/dev/shm/sem.{semaphore}", os.path.dirname(self.shared.address), folder]
        return [*files, *(str(child.pid) for child in children)]

    def close(self) -> None:
        pass


ENTRY = f"{__name__}:EchoWorker"


def spec(name="echo", init="hello") -> WorkerSpec:
    return WorkerSpec(name=name, entry=ENTRY, init=init)


@pytest.fixture(params=[InlineLauncher, LocalLauncher])
def launcher(request, tmp_path):
    launcher = request.param(tmp_path)
    yield launcher
    launcher.stop(grace_s=5)


@pytest.fixture
def local(tmp_path):
    launcher = LocalLauncher(tmp_path)
    yield launcher
    launcher.stop(grace_s=5)


def next_event(launcher, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if events := launcher.wait(1.0):
            assert len(events) == 1
            return events[0]
    raise AssertionError("no event")


def test_worker_reports_ready_and_replies_in_order(launcher):
    launcher.start(spec(), timeout_s=60)
    ready = next_event(launcher)
    assert ready.worker == "echo"
    assert isinstance(ready.message, WorkerReady)
    assert ready.message.task_limit == len("hello")
    launcher.send("echo", "a", timeout_s=10)
    launcher.send("echo", "b", timeout_s=10)
    assert answers(launcher, 2) == ["a!", "b!"]


def test_worker_exception_keeps_text_and_traceback(launcher):
    launcher.start(spec(), timeout_s=60)
    next_event(launcher)
    launcher.send("echo", "raise", timeout_s=10)
    died = next_event(launcher).message
    assert isinstance(died, WorkerDied)
    assert "environment 3 returned NaN" in died.reason
    assert "in handle" in died.traceback


def test_sys_exit_in_a_worker_is_reported_as_a_worker_death(launcher):
    """In the driver's process it would end the run with exit code 0."""
    launcher.start(spec(), timeout_s=60)
    next_event(launcher)
    launcher.send("echo", "sys.exit", timeout_s=10)
    died = next_event(launcher).message
    assert isinstance(died, WorkerDied)
    assert "SystemExit" in died.reason
    assert died.exit_code == 1


def test_long_request_and_long_reply_do_not_deadlock(launcher):
    """Fails if each end of a full pipe waits for the other end to read, which looks like a hung worker."""
    launcher.start(spec(), timeout_s=60)
    next_event(launcher)
    asked = [f"{name}{'x' * 2**22}" for name in "ab"]
    for one in asked:
        launcher.send("echo", one, timeout_s=10)
    assert [message[0] for message in answers(launcher, 2)] == ["a", "b"]


def answers(launcher, count):
    replies: list[str] = []
    while len(replies) < count:
        replies += [e.message for e in launcher.wait(10)]
        assert not any(isinstance(reply, WorkerDied) for reply in replies), replies[-1]
    return replies


def test_failed_worker_construction_is_reported_as_a_worker_death(launcher):
    launcher.start(spec(init="fail"), timeout_s=60)
    died = next_event(launcher).message
    assert isinstance(died, WorkerDied)
    assert "no simulator here" in died.reason


@pytest.mark.integration
@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 6, "signal 40")])
def test_worker_death_report_contains_the_signal(local, number, name):
    local.start(spec("first"), timeout_s=60)
    next_event(local)
    local.start(spec("second"), timeout_s=60)
    next_event(local)
    os.kill(workers_of(os.getpid())["first"], number)
    event = next_event(local)
    assert event.worker == "first"
    assert f"died with {name}" in event.message.reason
    local.send("second", "still here", timeout_s=10)
    assert next_event(local).message == "still here!"
    local.start(spec("first"), timeout_s=60)
    assert isinstance(next_event(local).message, WorkerReady)


@pytest.mark.integration
def test_killed_worker_is_reported_before_the_error_of_another_worker(local):
    """The error may be a consequence, for example of a lost connection between ranks."""
    for name in ("first", "second"):
        local.start(spec(name), timeout_s=60)
        assert isinstance(next_event(local).message, WorkerReady)
    processes = workers_of(os.getpid())
    local.send("first", "raise", timeout_s=60)
    os.kill(processes["second"], signal.SIGKILL)
    for process in processes.values():
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # both deaths are in the next report
    assert [event.worker for event in local.wait(1.0)] == ["second", "first"]


@pytest.mark.integration
def test_worker_death_report_contains_the_exit_code(local):
    local.start(spec(), timeout_s=60)
    next_event(local)
    local.send("echo", "exit", timeout_s=10)
    assert "code 7" in next_event(local).message.reason


@pytest.mark.integration
def test_hung_worker_is_killed_with_a_stack_dump(local):
    local.start(spec(), timeout_s=60)
    next_event(local)
    pid = workers_of(os.getpid())["echo"]
    local.send("echo", "hang", timeout_s=1.0)
    died = next_event(local).message
    assert "not respond for 1 s" in died.reason
    assert "in handle" in died.traceback, died.traceback
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.integration
def test_sending_to_a_hung_worker_times_out(local):
    """Fails if a long request is written to a full pipe without a deadline."""
    local.start(spec(), timeout_s=60)
    next_event(local)
    local.send("echo", "hang", timeout_s=1.0)
    local.send("echo", "long" * 2**20, timeout_s=100.0)
    assert "not respond for 1 s" in next_event(local).message.reason


@pytest.mark.integration
def test_partial_reply_of_a_stopped_worker_times_out(local):
    """Fails if the rest of a partial message is read without a deadline."""
    local.start(spec(), timeout_s=60)
    next_event(local)
    local.send("echo", "long", timeout_s=2)
    worker = local._handles["echo"]
    assert worker.channel.connection.poll(60)  # no pipe holds all of it
    os.kill(worker.process.pid, signal.SIGSTOP)
    os.waitpid(worker.process.pid, os.WUNTRACED)
    assert "did not respond for 2 s" in next_event(local).message.reason


def test_hung_inline_worker_is_interrupted_and_restarts(tmp_path):
    launcher = InlineLauncher(tmp_path)
    launcher.start(spec(), timeout_s=60)
    next_event(launcher)
    launcher.send("echo", "hang", timeout_s=1.0)
    died = next_event(launcher).message
    assert died.reason == "did not respond for 1 s"
    assert "in handle" in died.traceback
    launcher.start(spec(), timeout_s=60)
    next_event(launcher)
    launcher.send("echo", "new", timeout_s=10)
    assert next_event(launcher).message == "new!"
    launcher.stop()


@pytest.mark.integration
def test_stop_ends_all_processes(local):
    for name in ("a", "b"):
        local.start(spec(name), timeout_s=60)
        next_event(local)
    pids = workers_of(os.getpid()).values()
    assert len(pids) == 2
    local.send("b", "hang", timeout_s=100)
    local.stop(grace_s=0.5)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.integration
def test_stop_leaves_no_semaphore_folder_or_process_of_a_library(local):
    local.start(replace(spec(), component="env"), timeout_s=60)  # SIGTERM ends the children of such a worker
    next_event(local)
    local.send("echo", "leave", timeout_s=60)
    *files, first, second = next_event(local).message.removesuffix("!").split()
    assert all(map(os.path.exists, files)), files
    local.stop(grace_s=20)
    assert not [path for path in (*files, f"/proc/{first}", f"/proc/{second}") if os.path.exists(path)]


def test_restarted_inline_worker_gets_no_old_requests(tmp_path):
    launcher = InlineLauncher(tmp_path)
    launcher.start(spec(), timeout_s=60)
    next_event(launcher)
    launcher.send("echo", "raise", timeout_s=10)
    launcher.send("echo", "lost", timeout_s=10)
    assert isinstance(next_event(launcher).message, WorkerDied)
    launcher.start(spec(), timeout_s=60)
    assert isinstance(next_event(launcher).message, WorkerReady)
    assert launcher.wait(0.0) == []
    launcher.send("echo", "new", timeout_s=10)
    assert next_event(launcher).message == "new!"
    launcher.stop()
