"""Cleanup of threads and child processes of user code, such as simulators, when a process exits.

Run as a program, with a process id and a mark (a unique text in the environment variable EMBODYRL_OWNER), this module
waits for the end of that process, then kills all processes with the mark.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing import util
from pathlib import Path

_MAX_WAIT_S = 5.0
"""Maximum time in seconds to wait for threads and processes to end."""
_MAX_LISTED = 3
"""Maximum number of threads and processes listed in a message."""
_PR_SET_PDEATHSIG = 1
_TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of Python's resource tracker, which frees the shared memory of killed processes."""
_HELPER_PROCESSES = (_TRACKER, b"multiprocessing.forkserver", os.path.abspath(__file__).encode())
_OWNER = "EMBODYRL_OWNER"
"""Environment variable that marks a process; child processes inherit its value, <pid>-<random>/<name>[/<name>...]."""
_POLL_S = 0.2
_LAST_PRIORITY = -(10**9)
"""Priority of a finalizer of `multiprocessing` that runs after all others, which remove temporary folders."""
_FORKS_FD = 3
"""File descriptor from which the watchdog process reads the list of forked processes."""


def signal_at_parents_end(signum: int) -> None:
    """Request a signal from the kernel when the thread that started this process ends (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def get_signal_name(number: int) -> str:
    """Return the name of a signal, for example SIGKILL; real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def set_environ(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block, for processes that are started there."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def install_signal_handlers(handlers: Mapping[int, Callable[[int, object], None]]) -> Iterator[None]:
    """Install signal handlers in the block. SIGHUP stays ignored if the parent process ignores it (nohup)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    previous = {
        signum: signal.signal(signum, handler)
        for signum, handler in handlers.items()
        if not (is_ignored and signum == signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)


@contextlib.contextmanager
def mark_children(name: str) -> Iterator[None]:
    """Mark the processes started in the block, and their descendants, to be killed when this process ends.

    Without a mark, the children of a killed worker keep running. A watchdog process kills all marked processes when
    this process has ended, also after SIGKILL.
    """
    with set_environ({_OWNER: f"{_start_watchdog(os.getpid())[0]}/{name}"}):
        yield


def kill_marked_children(name: str) -> None:
    """Kill the processes that were started in the block `mark_children(name)` and still run, and their descendants."""
    mark, forks = _start_watchdog(os.getpid())
    _kill_marked(f"{mark}/{name}", forks)


@functools.lru_cache(maxsize=1)
def _start_watchdog(pid: int) -> tuple[str, int]:
    """Start the watchdog process, which waits for the end of this process and then kills its marked children.

    Returns:
        The mark for this process's children, and the descriptor of a file that lists forks. Forks need a list, because
        /proc/<pid>/environ of a fork shows the environment at the start of this process, without the mark.
    """
    mark, forks = f"{pid}-{secrets.token_hex(8)}", os.memfd_create("embodyrl-forks")
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(pid), mark]
    library_path = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
    null_streams = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    file_actions = [*null_streams, (os.POSIX_SPAWN_DUP2, forks, _FORKS_FD)]
    os.posix_spawn(sys.executable, command, library_path, file_actions=file_actions, setsid=True)
    os.register_at_fork(after_in_child=lambda: _record_fork(mark, forks))
    return mark, forks


def _record_fork(mark: str, forks: int) -> None:
    owner = os.environ.get(_OWNER, "")
    if owner.startswith(mark):
        # One `write` per line: forks share the position in the file. Start times distinguish reused process ids.
        os.write(forks, f"{os.getpid()} {_read_state(os.getpid())[1]} {owner}\n".encode())


def _read_state(pid: int) -> tuple[str, str]:
    """Return (state, start time) of a process from /proc/<pid>/stat; two empty strings if the process has ended."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return stat[0], stat[19]
    return "", ""


def _find_running_forks(mark: str, forks: int) -> Iterator[int]:
    """Yield the pids of running forks whose mark is `mark`, or starts with `<mark>/`."""
    for line in os.pread(forks, os.fstat(forks).st_size, 0).decode(errors="replace").splitlines():
        pid, started, owner = line.split(" ", 2)
        state, start = _read_state(int(pid))
        if start == started and state != "Z" and f"{owner}/".startswith(f"{mark}/"):
            yield int(pid)


def _kill_marked(mark: str, forks: int) -> None:
    """Kill all processes whose mark is `mark` or starts with `<mark>/`, repeatedly, until no process is left."""
    deadline, owner_prefix = time.monotonic() + _MAX_WAIT_S, f"{_OWNER}={mark}/"
    while time.monotonic() < deadline:
        pids = [*_find_running_forks(mark, forks)]
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
                is_marked = any(
                    f"{entry}/".startswith(owner_prefix) for entry in file.read_text(errors="replace").split("\0")
                )
                if is_marked and _TRACKER not in file.with_name("cmdline").read_bytes():
                    pids.append(int(file.parent.name))
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _wait_for_parent(pid: int, mark: str) -> None:
    while os.getppid() == pid:
        time.sleep(_POLL_S)
    _kill_marked(mark, _FORKS_FD)


def list_remaining_threads(before: Collection[threading.Thread] = ()) -> list[str]:
    """Return the names of non-daemon threads that are not in `before`; such threads keep this process alive."""
    excluded = {threading.main_thread(), threading.current_thread(), *before}
    return [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in excluded]


def list_remaining_children(before: Collection[int] = ()) -> dict[int, str]:
    """Return {pid: command} of running child processes that are not in `before`, except Python's helper processes."""
    commands = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            command = stat.with_name("cmdline").read_bytes()
        except (OSError, ValueError):  # the process has just ended
            continue
        pid = int(stat.parent.name)
        if (
            int(parent) == os.getpid()
            and state != "Z"
            and pid not in before
            and not any(o in command for o in _HELPER_PROCESSES)
        ):
            commands[pid] = " ".join(command.replace(b"\0", b" ").decode(errors="replace").split())[:80]
    return commands


def format_counts(names: list[str]) -> str:
    """Join names with their counts and shorten a long list, for example "3 x thread a, process b and 2 more"."""
    parts = [f"{count} x {name}" if count > 1 else name for name, count in Counter(names).items()]
    return ", ".join(parts[:_MAX_LISTED]) + (
        f" and {len(parts) - _MAX_LISTED} more" if len(parts) > _MAX_LISTED else ""
    )


def end_children() -> None:
    """Kill the child processes of this process, and wait for them."""
    for child in multiprocessing.active_children():  # includes children of a fork server
        child.kill()
    for pid in list_remaining_children():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the process has just ended
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def end_children_at_exit() -> None:
    """Kill the child processes of this `multiprocessing` process when its target returns; call this function first.

    Managers and pools of the target stop their own processes before.
    """
    # Finalizers of one priority run in reverse order of creation; those below 0 run after children are joined.
    util.Finalize(None, end_children, exitpriority=0)


def skip_destructors(code: int) -> None:
    """End this `multiprocessing` process with `code` when its target returns, without destructors or threads.

    Semaphores and temporary folders are freed before, because `os._exit` would not free them.
    """
    util.Finalize(None, os._exit, args=(code,), exitpriority=_LAST_PRIORITY)


def exit_with_leftovers(code: int) -> None:
    """Start a watchdog that exits with `code` if threads or child processes keep the interpreter alive."""

    def watch() -> None:
        deadline = time.monotonic() + _MAX_WAIT_S
        while (threads := list_remaining_threads()) or any(
            not child.daemon for child in multiprocessing.active_children()
        ):
            if time.monotonic() >= deadline:
                processes = [f"process {child.name}" for child in multiprocessing.active_children()]
                for child in multiprocessing.active_children():
                    child.kill()
                leftovers = format_counts([*(f"thread {name}" for name in threads), *processes])
                sys.stderr.write(
                    f"embodyrl: warning: {leftovers} did not end and would keep this process alive; exiting now. "
                    "Likely an environment's close() does not end them: fix it there.\n"
                )
                sys.stderr.flush()
                os._exit(code)
            time.sleep(0.05)

    if list_remaining_threads() or multiprocessing.active_children():
        threading.Thread(target=watch, name="exit-watch", daemon=True).start()


if __name__ == "__main__":
    _wait_for_parent(int(sys.argv[1]), sys.argv[2])
