"""Sandbox process for programs of a language model; `sandbox.py` runs this source with `python -I -c`.

This process is trusted. Before it reads the tests, it forks a process that starts the programs, so that programs
inherit neither tests nor descriptors. For each test of functions, it forks another restricted child for the test
(`sandboxed_tests.py`). Changes of a program to its own process affect no result. At the end, or when the requesting
process exits, all remaining processes of children are killed and their folder is removed.
"""

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import platform
import resource
import secrets
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

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
        *(42, 49, 285, 275, 276, 278),  # connect, bind, fallocate, splice, tee, vmsplice: sockets, disk, memory
        # utime, utimes, futimesat, utimensat, chown and its kin, set and remove xattr, file_setattr: files of others
        *(132, 235, 261, 280, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199, 463, 466, 469),
        # inotify_init, _init1, fanotify_init; io_setup, flock, timer_create: names and resources of all processes
        *(253, 294, 300, 206, 73, 222),
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
        *(203, 200, 47, 76, 77, 75),
        *(88, 54, 55, 5, 6, 7, 14, 15, 16, 463, 466, 469),
        *(26, 262, 0, 32, 107),
    ),
}
"""AUDIT_ARCH (linux/audit.h) and the numbers of the blocked system calls, by machine architecture."""
_BY_ARGUMENT = (
    # fcntl: F_SETOWN, F_SETOWN_EX, F_SETSIG, and F_SETFL with O_ASYNC; ioctl: FIOASYNC, FIOSETOWN, SIOCSPGRP,
    # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR.
    *(("fcntl", (1, "is", command)) for command in (8, 15, 10)),
    ("fcntl", (1, "is", 4), (2, "some", 0x2000)),
    *(("ioctl", (1, "is", command)) for command in (0x5452, 0x8901, 0x8902, 0x40086602, 0x401C5820)),
    ("prlimit64", (0, "not", 0)),
    ("socketpair", (1, "some", 0x6)),  # all types but SOCK_STREAM, which cannot send to other addresses
    ("prctl", (0, "is", 1)),  # PR_SET_PDEATHSIG, which ends the program with its sandbox
)
"""System calls that are blocked only with certain arguments, for example to signal other processes."""
_NUMBERS = {
    "x86_64": {"fcntl": 72, "ioctl": 16, "prlimit64": 302, "socketpair": 53, "prctl": 157},
    "aarch64": {"fcntl": 25, "ioctl": 29, "prlimit64": 261, "socketpair": 199, "prctl": 167},
}
_DENIED_WITH = {
    machine: [(numbers[name], *conditions) for name, *conditions in _BY_ARGUMENT]
    for machine, numbers in _NUMBERS.items()
}
_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_PASSED = b"passed"
"""Message that a passed test writes to a pipe that programs cannot access."""
_PACKAGE = "embodyrl.text"
_libc = ctypes.CDLL(None)
_prctl = _libc.prctl


def main() -> None:
    """Read a request from stdin and write the outcome of each test to stdout.

    argv[1] is a descriptor that stays open while the requesting process waits. argv[2] contains the tests.
    """
    lifeline, tests, request = int(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin)
    sys.argv = [""]
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    _prctl(_DUMPABLE, 0, 0, 0, 0)  # programs of the same user may not reach into this process
    for name, source in request.pop("modules").items():
        module = sys.modules[name] = ModuleType(name)
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    os.mkdir(request["folder"], 0o711)
    programs, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        for descriptor in (lifeline, tests, programs.detach()):
            os.close(descriptor)
        _start_programs(request, orders)
    orders.close()
    try:
        with open(tests, encoding="utf-8") as file:
            outcomes = [_run_attempt(request, test, programs, lifeline) for test in json.load(file)]
    finally:
        programs.close()
        os.waitpid(pid, 0)
        shutil.rmtree(request["folder"], ignore_errors=True)
    sys.stdout.write(json.dumps(outcomes))


def _run_attempt(
    request: dict[str, Any], test: str | dict[str, str], programs: socket.socket, lifeline: int
) -> tuple[bool, int | None, str]:
    """Run the program and one test; return success, exit code (None: timeout), and the output or the reason.

    A dictionary compares the output of the program. With an empty test, only the program runs.
    """
    end = min(time.monotonic() + request["seconds"], request["deadline"])
    if end <= time.monotonic():
        return False, None, ""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=request["folder"], ignore_cleanup_errors=True))
        os.chmod(folder, 0o711)
        stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile(dir=request["folder"])) for _ in range(3))
        files = [file.fileno() for file in (stdin, stdout, stderr)]
        if test and isinstance(test, str):
            passed, rejected = _run_test(request, test, folder, files, end, programs, lifeline)
            return passed, None, rejected
        stdin.write(test["input"].encode() if isinstance(test, dict) else b"")
        stdin.seek(0)
        _request_program(programs, folder, files)
        finished, reason = _wait(programs.fileno(), lifeline, end, folder)
        code = _stop_program(programs)
        code = 1 if reason else code
        text, errors = _tail(stdout, whole=bool(test)), _tail(stderr)
        last = reason or errors.strip().rpartition("\n")[2][-200:] or f"exit code {code}"
        passed = code == 0 and finished and (not test or _lines(text) == _lines(test["output"]))
        return passed, code if finished or reason else None, text[-2000:] if code == 0 else last


def _run_test(
    request: dict[str, Any],
    test: str,
    folder: str,
    files: list[int],
    end: float,
    programs: socket.socket,
    lifeline: int,
) -> tuple[bool, str]:
    """Run a test in a process that is connected to the program; return success, and why the test is refused or ""."""
    stdin, stdout, stderr = files
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    result_read, result_write = os.pipe()

    def verify() -> None:
        rejection = sys.modules[f"{_PACKAGE}.sandboxed_tests"].run_test(test, 3, 4)
        os.write(5, f"refused {rejection}".encode() if rejection else _PASSED)

    _request_program(programs, os.path.join(folder, "program"), [stdin, stdout, stdout, request_read, reply_write])
    test_folder = os.path.join(folder, "test")
    pid = _fork(
        request,
        test_folder,
        _assign_user(test_folder),
        [stdin, stderr, stderr, reply_read, request_write, result_write],
        verify,
    )
    for descriptor in (request_read, request_write, reply_read, reply_write, result_write):
        os.close(descriptor)
    try:
        finished, _ = _wait(result_read, lifeline, end, folder)
        result = os.read(result_read, 4096) if finished else b""
    finally:
        os.close(result_read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _stop_program(programs)
    return result == _PASSED, result.decode().removeprefix("refused ") if result.startswith(b"refused") else ""


def _request_program(programs: socket.socket, folder: str, files: list[int]) -> None:
    """Start the program in a new folder `folder`; its file descriptors 0, 1, ... are `files`.

    A program with more than three descriptors serves a test by the other two.
    """
    message = {"place": folder, "owner": _assign_user(folder), "serves": len(files) > 3}
    socket.send_fds(programs, [json.dumps(message).encode()], files)


def _stop_program(programs: socket.socket) -> int:
    """Kill the program if it still runs, and return its exit code."""
    programs.send(b"{}")
    return int(programs.recv(64))


def _start_programs(request: dict[str, Any], orders: socket.socket) -> NoReturn:
    """Start programs until the other end of `orders` is closed; send the exit code of each program."""
    _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    source = request["program"]

    def run(serves: bool) -> None:
        if serves:
            return sys.modules[f"{_PACKAGE}.sandboxed_calls"].serve_program(source, 3, 4)
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(source, "<program>", "exec"), module.__dict__)

    while True:
        message, files, _, _ = socket.recv_fds(orders, 4096, 8)
        if not message:
            os._exit(0)
        if not files:  # the program to be killed has exited
            continue
        command = json.loads(message)
        pid = _fork(request, command["place"], command["owner"], files, functools.partial(run, command["serves"]))
        for descriptor in files:
            os.close(descriptor)
        process_descriptor = os.pidfd_open(pid)
        if process_descriptor not in select.select([process_descriptor, orders], [], [])[0]:
            orders.recv(64)
        os.close(process_descriptor)
        orders.send(str(_kill_descendants(pid)).encode())


def _fork(request: dict[str, Any], folder: str, owner: int | None, files: list[int], action: Callable[[], Any]) -> int:
    """Fork a child that drops its privileges and calls `action`; its file descriptors 0, 1, ... are `files`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _confine(request, folder, owner, files)
            code = _exit_code(action)
        finally:
            os._exit(code)
    return pid


def _assign_user(folder: str) -> int | None:
    """Make a folder and, as root, an unused user id its owner; return the user id."""
    os.makedirs(folder, exist_ok=True)
    if os.getuid() != 0:
        return None
    # In a container the kernel may have only 65536 user ids.
    for user in (2**20 + secrets.randbelow(2**30), 20_000 + secrets.randbelow(40_000), NOBODY):
        with contextlib.suppress(OSError):
            os.chown(folder, user, user)
            os.chmod(folder, 0o700)
            return user
    raise SystemExit("The sandbox found no unused user id for a program.")


def _wait(descriptor: int, lifeline: int, end: float, folder: str) -> tuple[bool, str]:
    """Wait until `descriptor` is readable or `end`; return True if it is readable, and the exceeded limit or ""."""
    while (remaining := end - time.monotonic()) > 0:
        if sum(len(files) for _, _, files in os.walk(folder)) > FILES:
            return False, f"more than {FILES} files"
        ready, _, _ = select.select([descriptor, lifeline], [], [], min(remaining, _POLL_S))
        if lifeline in ready:
            sys.exit("the requesting process is gone")
        if ready:
            return True, ""
    return False, ""


def _tail(file: Any, *, whole: bool = False) -> str:
    file.seek(0 if whole else max(0, os.fstat(file.fileno()).st_size - 8192))
    return file.read().decode(errors="replace")


def _lines(text: str) -> list[str]:
    """Return the lines of a text without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _kill_descendants(pid: int) -> int:
    """Kill the child and all its descendants, and return the exit code of the child.

    Orphans become children of this process.
    """
    code = -signal.SIGKILL
    while True:
        # Repeatedly: a killed process may have started others in between.
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            waited_pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        code = os.waitstatus_to_exitcode(status) if waited_pid == pid else code


def _confine(request: dict[str, Any], folder: str, owner: int | None, files: list[int]) -> None:
    """Restrict this process before it runs the program: descriptors, privileges, time, memory, processes, threads."""
    os.setsid()
    duplicates = [fcntl.fcntl(source, fcntl.F_DUPFD, 100) for source in files]
    for target, source in enumerate(duplicates):
        os.dup2(source, target)
    os.closerange(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(folder)
    cpu = max(1, round(request["seconds"] + 0.5))
    limits = ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CORE, 0))
    for name, value in (*limits, (resource.RLIMIT_FSIZE, OUTPUT_BYTES), (resource.RLIMIT_NOFILE, FILES)):
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # Without this flag the kernel lets only root set filters.
    _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    prefixes = {prefix: os.open(prefix, os.O_PATH) for prefix in {sys.base_prefix, sys.prefix}}
    is_restricted = _restrict_files(request["readable"])
    if owner is not None:  # the kernel counts no processes of root
        os.fchown(0, owner, owner)  # for programs that open /dev/stdin
        # In this order: without root, a process cannot change its groups.
        os.setgroups([])
        os.setgid(owner)
        os.setuid(owner)
    for prefix, descriptor in prefixes.items():
        if os.access(prefix, os.X_OK) or not is_restricted:
            os.close(descriptor)
            continue
        # A Python below /root: its modules are found by a descriptor, behind which Landlock allows only libraries.
        for paths in (sys.path, *(module.__path__ for module in sys.modules.values() if hasattr(module, "__path__"))):
            paths[:] = [path.replace(prefix, f"/proc/self/fd/{descriptor}", 1) for path in paths]
    # After the change of user, which resets these settings.
    _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _prctl(_DUMPABLE, 0, 0, 0, 0)
    _restrict_calls()


def _restrict_files(readable: list[str]) -> bool:
    """Restrict file access with Landlock (Linux 5.13 or later; linux/landlock.h); return False without Landlock.

    Programs may write to the working folder, and read only libraries, their input and this folder. Newer kernels also
    block TCP connections (6.7) and signals to other processes (6.12).
    """
    version = _libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    write, read, remove, make, truncate = 1 << 1, 3 << 2, 1 << 5, 1 << 8, (1 << 14 if version >= 3 else 0)
    # 0: execute, 2 and 3: read files and folders, 4 to 12: remove and make anything, 13: move, link
    all_rights = 0x1FFF | truncate | (1 << 13 if version >= 2 else 0)
    rules = [
        all_rights,
        *([3] if version >= 4 else []),
        *([3] if version >= 6 else []),
    ]  # bind, connect; sockets, signals
    ruleset = _libc.syscall(444, struct.pack(f"{len(rules)}Q", *rules), 8 * len(rules), 0)
    rules_by_path: list[tuple[str | int, int]] = [
        (".", write | read | truncate | remove | make),
        (os.devnull, write | 4),
        (0, 4),
    ]
    for target, allowed in [*rules_by_path, *((path, read if os.path.isdir(path) else 4) for path in readable)]:
        descriptor = os.open(target, os.O_PATH) if isinstance(target, str) else os.dup(target)
        _libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    _libc.syscall(446, ruleset, 0)
    os.close(ruleset)
    return True


def _restrict_calls() -> None:
    """Install a seccomp filter that blocks system calls (linux/seccomp.h, linux/filter.h).

    Blocked calls fail with EPERM; calls of another architecture kill the process.
    """
    arch, *denied = _DENIED.get(platform.machine(), (0,))
    if not denied:
        return
    load, equal, any_bits, at_least, return_value, deny = 0x20, 0x15, 0x45, 0x35, 0x06, 0x00050001
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (return_value, 0, 0, 0), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (return_value, 0, 0, deny)]  # the same calls under the numbers of x32
    for number in denied:
        lines += [(equal, 0, 1, number), (return_value, 0, 0, deny)]
    for number, *conditions in _DENIED_WITH[platform.machine()]:
        # If a condition does not hold, jump behind the rule.
        lines += [(load, 0, 0, 0), (equal, 0, 2 * len(conditions) + 1, number)]
        for index, (argument, relation, value) in enumerate(conditions):
            behind = 2 * (len(conditions) - index) - 1
            jumps = (behind, 0) if relation == "not" else (0, behind)
            lines += [(load, 0, 0, 16 + 8 * argument), (any_bits if relation == "some" else equal, *jumps, value)]
        lines += [(return_value, 0, 0, deny)]
    lines += [(return_value, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    _prctl(_SECCOMP, 2, struct.pack("@HP", len(lines), ctypes.addressof(code)), 0, 0)


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
