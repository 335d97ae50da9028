"""What foreign code leaves running: threads and child processes that would keep a process alive, or outlive it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

_PATIENCE_S = 5.0
"""For threads and processes that end by themselves."""
_NAMED = 3
"""Leftovers that a message names."""
_PR_SET_PDEATHSIG = 1
_OURS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def signal_at_parents_end(signum: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def threads_left(before: Collection[threading.Thread] = ()) -> list[str]:
    """Return the names of threads, other than the main one, that keep this process alive."""
    known = {threading.main_thread(), threading.current_thread(), *before}
    return [one.name for one in threading.enumerate() if not one.daemon and one not in known]


def children_left(before: Collection[int] = ()) -> dict[int, str]:
    """Return process id and command of the running children of this process, other than Python's own."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            command = stat.with_name("cmdline").read_bytes()
        except (OSError, ValueError):  # it has just ended
            continue
        pid = int(stat.parent.name)
        if int(parent) == os.getpid() and state != "Z" and pid not in before and not any(o in command for o in _OURS):
            found[pid] = " ".join(command.replace(b"\0", b" ").decode(errors="replace").split())[:80]
    return found


def left_after(seconds: float, threads: Collection[threading.Thread] = (), children: Collection[int] = ()) -> str:
    """Return which threads and child processes still run after some time, other than those given; empty: none."""
    ends = time.monotonic() + seconds
    while left := [
        *(f"thread {name}" for name in threads_left(threads)),
        *(f"process {pid} ({command})" for pid, command in children_left(children).items()),
    ]:
        if time.monotonic() >= ends:
            break
        time.sleep(0.02)
    return _listed(left)


def _listed(names: list[str]) -> str:
    counted = [f"{count} x {name}" if count > 1 else name for name, count in Counter(names).items()]
    return ", ".join(counted[:_NAMED]) + (f" and {len(counted) - _NAMED} more" if len(counted) > _NAMED else "")


def end_children() -> None:
    """Kill the children of this process, and wait for them."""
    for pid in children_left():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_in_spite_of_leftovers(code: int) -> None:
    """Let the interpreter exit by itself; name what keeps it alive after a while, and exit with `code`."""

    def watch() -> None:
        ends = time.monotonic() + _PATIENCE_S
        while (threads := threads_left()) or any(not one.daemon for one in multiprocessing.active_children()):
            if time.monotonic() >= ends:
                processes = [f"process {one.name}" for one in multiprocessing.active_children()]
                for one in multiprocessing.active_children():
                    one.kill()
                left = _listed([*(f"thread {name}" for name in threads), *processes])
                sys.stderr.write(
                    f"embodyrl: warning: {left} did not end and would keep this process alive; exiting now. Likely an "
                    "environment's close() does not end them: fix it there.\n"
                )
                sys.stderr.flush()
                os._exit(code)
            time.sleep(0.05)

    if threads_left() or multiprocessing.active_children():
        threading.Thread(target=watch, name="exit-watch", daemon=True).start()
