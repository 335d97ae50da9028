"""Sandbox process for programs of a language model; `sandbox.py` runs this source with `python -I -c`.

This process is trusted. For each test it forks a restricted child for the program and, if functions of the program
are tested, another child for the test (`sandboxed_calls.py`). Changes of a program to its own process affect no
result. At the end, or when the requesting process exits, all remaining processes of children are killed and their
folder is removed.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import secrets
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

NOBODY = 65534
OUTPUT_BYTES = 1 << 20
"""Maximum size of every file that a program writes, including its output."""
FILES = 64
"""Maximum number of files and of file descriptors of a program; unlinked open files also use memory."""
_POLL_S = 0.05
_DENIED = {
    "x86_64": (
        0xC000003E,
        *(41, 29, 64, 68, 240),  # socket, shmget, semget, msgget, mq_open: a network, memory that outlives its process
        *(319, 447, 248, 249, 250),  # memfd_create, memfd_secret, add_key, request_key, keyctl: memory beyond the limit
        # kill and its kin, ptrace, process_vm_*: other programs
        *(62, 200, 234, 129, 297, 424, 101, 310, 311),
        *(83, 258, 90, 91, 268, 452),  # mkdir, mkdirat: trees too deep to remove; chmod, fchmod, fchmodat, fchmodat2
        *(272, 308, 165, 430, 425, 323, 321, 298),  # unshare, setns, mount, fsopen, io_uring, userfaultfd, bpf, perf
        # setpriority, sched_setparam, _setscheduler, _setaffinity, _setattr, ioprio_set: other processes
        *(141, 142, 144, 203, 314, 251),
        *(
            434,
            438,
            440,
            448,
            256,
            279,
        ),  # pidfd_open, pidfd_getfd, process_madvise, _mrelease, migrate_, move_pages
    ),
    "aarch64": (
        0xC00000B7,
        *(198, 194, 190, 186, 180),
        *(279, 447, 217, 218, 219),
        *(129, 130, 131, 138, 240, 424, 117, 270, 271),
        *(34, 52, 53, 452),
        *(97, 268, 40, 430, 425, 282, 280, 241),
        *(140, 118, 119, 122, 274, 30),
        *(434, 438, 440, 448, 238, 239),
    ),
}
"""AUDIT_ARCH (linux/audit.h) and the numbers of the blocked system calls, by machine architecture."""
_BY_ARGUMENT = (
    # fcntl: F_SETOWN, F_SETOWN_EX, F_SETSIG, and F_SETFL with O_ASYNC; ioctl: FIOASYNC, FIOSETOWN, SIOCSPGRP.
    *(("fcntl", (1, "is", command)) for command in (8, 15, 10)),
    ("fcntl", (1, "is", 4), (2, "some", 0x2000)),
    *(("ioctl", (1, "is", command)) for command in (0x5452, 0x8901, 0x8902)),
    ("prlimit64", (0, "not", 0)),
)
"""System calls that are blocked only with certain arguments, for example to signal other processes."""
_NUMBERS = {
    "x86_64": {"fcntl": 72, "ioctl": 16, "prlimit64": 302},
    "aarch64": {"fcntl": 25, "ioctl": 29, "prlimit64": 261},
}
_DENIED_WITH = {
    machine: [(numbers[name], *conditions) for name, *conditions in _BY_ARGUMENT]
    for machine, numbers in _NUMBERS.items()
}
_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_PASSED = b"passed"
"""Message that a passed test writes to a pipe that programs cannot access."""
_libc = ctypes.CDLL(None)
_prctl = _libc.prctl
calls = ModuleType("calls")
"""Module with the content of `sandboxed_calls.py`, loaded by `main`."""


def main() -> None:
    """Read a request from stdin and write the outcome of each test to stdout.

    argv[1] is a descriptor that stays open while the requesting process waits. argv[2] contains the tests. This
    process never reads the tests, because forked programs would inherit them in memory.
    """
    lifeline, tests, request = int(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin)
    sys.argv = [""]
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    _prctl(_DUMPABLE, 0, 0, 0, 0)  # programs of the same user may not reach into this process
    exec(compile(request["calls"], "<calls>", "exec"), calls.__dict__)
    os.mkdir(request["folder"], 0o711)
    try:
        outcomes = [_attempt(request, test, tests, lifeline) for test in request["tests"]]
    finally:
        shutil.rmtree(request["folder"], ignore_errors=True)
    sys.stdout.write(json.dumps(outcomes))


def _attempt(request: dict[str, Any], test: dict[str, Any], tests: int, lifeline: int) -> tuple[bool, int | None, str]:
    """Run the program and one test; return success, exit code (None: timeout) and the program's output.

    A test has `place`: start and length of its source, or of the expected output, in the file `tests`. A test with
    `input` compares the output of the program. Without `place` and `input`, only the program runs.
    """
    end = min(time.monotonic() + request["seconds"], request["deadline"])
    if end <= time.monotonic():
        return False, None, ""
    reads = "input" in test or "place" not in test
    with contextlib.ExitStack() as kept:
        place = kept.enter_context(tempfile.TemporaryDirectory(dir=request["folder"], ignore_cleanup_errors=True))
        os.chmod(place, 0o711)
        given, said, wrong = (kept.enter_context(tempfile.TemporaryFile(dir=request["folder"])) for _ in range(3))
        given.write(test.get("input", "").encode())
        given.seek(0)
        done, report = os.pipe()
        if reads:
            files = [given.fileno(), said.fileno(), wrong.fileno(), report]
            pid = _start(request, place, files, lambda: _run(request["program"]))
        else:
            pid = _start_test(
                request, test["place"], place, [given.fileno(), said.fileno(), wrong.fileno(), report, tests]
            )
        os.close(report)
        heard, over, why = _listen(done, lifeline, end, place)
        os.close(done)
        code = _sweep(pid)
        texts = [_tail(said, whole="input" in test), _tail(wrong)]
    if not reads:
        return over and heard == _PASSED, code if over else None, ""
    code = 1 if why else code
    last = why or texts[1].strip().rpartition("\n")[2][-200:] or f"exit code {code}"
    passed = code == 0 and over and ("place" not in test or _compare(texts[0], test["place"], tests))
    return passed, code if over or why else None, texts[0][-2000:] if code == 0 else last


def _start_test(request: dict[str, Any], where: list[int], place: str, files: list[int]) -> int:
    """Start the program, and the test in a separate process connected to it; return the pid of the test."""
    given, said, wrong, report, tests = files
    asked, ask = os.pipe()
    answered, answer = os.pipe()

    def serve() -> None:
        calls.serve_program(request["program"], 3, 4)  # type: ignore[attr-defined]

    def judge() -> None:
        calls.run_test(json.loads(os.pread(6, where[1], where[0])), 3, 4)  # type: ignore[attr-defined]
        os.write(5, _PASSED)

    _start(request, os.path.join(place, "program"), [given, said, said, asked, answer], serve)
    pid = _start(request, os.path.join(place, "test"), [given, wrong, wrong, answered, ask, report, tests], judge)
    for descriptor in (asked, ask, answered, answer):
        os.close(descriptor)
    return pid


def _compare(said: str, where: list[int], tests: int) -> bool:
    """Return True if a program printed the expected output.

    The comparison runs in a separate process, so that later programs cannot read the expected output.
    """
    pid = os.fork()
    if pid == 0:
        wanted = json.loads(os.pread(tests, where[1], where[0]))["output"]
        os._exit(_lines(said) != _lines(wanted))
    return os.waitpid(pid, 0)[1] == 0


def _start(request: dict[str, Any], place: str, files: list[int], action: Callable[[], Any]) -> int:
    """Fork a child that drops its privileges and calls `action`; its file descriptors 0, 1, ... are `files`."""
    os.makedirs(place, exist_ok=True)
    owner = _own_user(place) if os.getuid() == 0 else None
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _confine(request, place, owner, files)
            code = _exit_code(action)
        finally:
            os._exit(code)
    return pid


def _own_user(place: str) -> int:
    """Make an unused user id the owner of a folder; return the user id."""
    # In a container the kernel may have only 65536 user ids.
    for user in (2**20 + secrets.randbelow(2**30), 20_000 + secrets.randbelow(40_000), NOBODY):
        with contextlib.suppress(OSError):
            os.chown(place, user, user)
            os.chmod(place, 0o700)
            return user
    raise SystemExit("The sandbox found no unused user id for a program.")


def _listen(done: int, lifeline: int, end: float, place: str) -> tuple[bytes, bool, str]:
    """Wait for a child process until `end`; return its message, True if it exited, and the exceeded limit or ""."""
    heard = b""
    while (left := end - time.monotonic()) > 0:
        if sum(len(files) for _, _, files in os.walk(place)) > FILES:
            return heard, False, f"more than {FILES} files"
        ready, _, _ = select.select([done, lifeline], [], [], min(left, _POLL_S))
        if lifeline in ready:
            _sweep(0)
            sys.exit("the requesting process is gone")
        part = os.read(done, 64) if ready else b""
        if ready and not part:
            return heard, True, ""
        heard += part
    return heard, False, ""


def _tail(file: Any, *, whole: bool = False) -> str:
    file.seek(0 if whole else max(0, os.fstat(file.fileno()).st_size - 8192))
    return file.read().decode(errors="replace")


def _lines(text: str) -> list[str]:
    """Return the lines of a text without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _sweep(pid: int) -> int:
    """Kill the child and all its descendants, and return the exit code of the child.

    Orphans become children of this process.
    """
    code = -signal.SIGKILL
    while True:
        # Repeatedly: a killed process may have started others in between.
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            found, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        code = os.waitstatus_to_exitcode(status) if found == pid else code


def _confine(request: dict[str, Any], place: str, owner: int | None, files: list[int]) -> None:
    """Restrict this process before it runs the program: descriptors, privileges, time, memory, processes, threads."""
    os.setsid()
    aside = [fcntl.fcntl(source, fcntl.F_DUPFD, 100) for source in files]
    for target, source in enumerate(aside):
        os.dup2(source, target)
    os.closerange(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(place)
    cpu = max(1, round(request["seconds"] + 0.5))
    limits = ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CORE, 0))
    for name, value in (*limits, (resource.RLIMIT_FSIZE, OUTPUT_BYTES), (resource.RLIMIT_NOFILE, FILES)):
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if owner is not None:  # the kernel counts no processes of root
        prefixes = {prefix: os.open(prefix, os.O_PATH) for prefix in {sys.base_prefix, sys.prefix}}
        # In this order: without root, a process cannot change its groups.
        os.setgroups([])
        os.setgid(owner)
        os.setuid(owner)
        for prefix, descriptor in prefixes.items():
            if not os.access(prefix, os.X_OK):  # a Python below /root: its modules are found by descriptor
                for paths in (sys.path, *(m.__path__ for m in sys.modules.values() if hasattr(m, "__path__"))):
                    paths[:] = [path.replace(prefix, f"/proc/self/fd/{descriptor}", 1) for path in paths]
    # Without this flag the kernel lets only root set filters.
    _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # After the change of user, which resets this setting.
    _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _bar_files()
    _bar_calls()


def _bar_files() -> None:
    """Restrict file writes to the working folder with Landlock (Linux 5.13 or later; linux/landlock.h).

    Newer kernels also block TCP connections (6.7) and signals to other processes (6.12).
    """
    version = _libc.syscall(444, None, 0, 1)
    if version < 1:
        return
    write, remove, make, truncate = 1 << 1, 1 << 5, 1 << 8, (1 << 14 if version >= 3 else 0)
    every = write | truncate | 0x1FF0 | (1 << 13 if version >= 2 else 0)  # remove, make anything; 13: move, link
    rules = [every, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # bind, connect; sockets, signals
    ruleset = _libc.syscall(444, struct.pack(f"{len(rules)}Q", *rules), 8 * len(rules), 0)
    places = ((".", write | remove | make | truncate), (os.devnull, write))
    for place, allowed in places:
        descriptor = os.open(place, os.O_PATH)
        _libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    _libc.syscall(446, ruleset, 0)
    os.close(ruleset)


def _bar_calls() -> None:
    """Install a seccomp filter that blocks system calls (linux/seccomp.h, linux/filter.h).

    Blocked calls fail with EPERM; calls of another architecture kill the process.
    """
    arch, *denied = _DENIED.get(platform.machine(), (0,))
    if not denied:
        return
    load, equal, some, at_least, answer, refuse = 0x20, 0x15, 0x45, 0x35, 0x06, 0x00050001
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, 0), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the same calls under the numbers of x32
    for number in denied:
        lines += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    for number, *conditions in _DENIED_WITH[platform.machine()]:
        # If a condition does not hold, jump behind the rule.
        lines += [(load, 0, 0, 0), (equal, 0, 2 * len(conditions) + 1, number)]
        for k, (argument, holds, value) in enumerate(conditions):
            behind = 2 * (len(conditions) - k) - 1
            jumps = (behind, 0) if holds == "not" else (0, behind)
            lines += [(load, 0, 0, 16 + 8 * argument), (some if holds == "some" else equal, *jumps, value)]
        lines += [(answer, 0, 0, refuse)]
    lines += [(answer, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    _prctl(_SECCOMP, 2, struct.pack("@HP", len(lines), ctypes.addressof(code)), 0, 0)


def _run(program: str) -> None:
    """Execute the source of a program as the module `__main__`."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<program>", "exec"), module.__dict__)


def _exit_code(action: Callable[[], Any]) -> int:
    """Call a function in the child process; return the exit code, and write the reason for a failure to stderr."""
    code = 0
    try:
        try:
            action()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            os.write(2, b"" if code == end.code else str(end.code).encode(errors="replace"))
        sys.stdout.flush()
    except BaseException as error:
        os.write(2, "".join(traceback.format_exception_only(error)).encode(errors="replace"))
        code = 1
    return code & 0xFF


main()
