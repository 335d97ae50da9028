"""Carries out programs of a language model; `sandbox.py` starts this text with `python -I -c`, outside the package.

This process is trusted. It forks a limited child for each test, ends whatever that child leaves behind, and removes
their folder when it is done, or as soon as the process that asked is gone.
"""

import ctypes
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
from pathlib import Path
from types import ModuleType
from typing import Any

NOBODY = 65534
OUTPUT_BYTES = 1 << 20
"""Size of every file that a program writes, its output included."""
FILES = 64
"""Files of a program, and descriptors: what is removed while it is open, or never had a name, takes memory too."""
_POLL_S = 0.05
_DENIED = {
    "x86_64": (
        0xC000003E,
        *(41, 29, 64, 68, 240),  # socket, shmget, semget, msgget, mq_open: a network, memory that outlives its process
        *(319, 447, 248, 249, 250),  # memfd_create, memfd_secret, add_key, request_key, keyctl: memory beside the limit
        # kill and its kin, ptrace, process_vm_*: other programs
        *(62, 200, 234, 129, 297, 424, 101, 310, 311),
        *(83, 258, 90, 91, 268, 452),  # mkdir, mkdirat: trees too deep to remove; chmod, fchmod, fchmodat, fchmodat2
        *(272, 308, 165, 430, 425, 323, 321, 298),  # unshare, setns, mount, fsopen, io_uring, userfaultfd, bpf, perf
    ),
    "aarch64": (
        0xC00000B7,
        *(198, 194, 190, 186, 180),
        *(279, 447, 217, 218, 219),
        *(129, 130, 131, 138, 240, 424, 117, 270, 271),
        *(34, 52, 53, 452),
        *(97, 268, 40, 430, 425, 282, 280, 241),
    ),
}
"""AUDIT_ARCH of a machine (linux/audit.h), and the numbers of the system calls that a program does without."""
_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_TOKEN_BYTES = 16
_libc = ctypes.CDLL(None)
_prctl = _libc.prctl


def main() -> None:
    """Read a request from stdin and write the outcome of each test to stdout; argv[1] is open while we are wanted."""
    lifeline, request = int(sys.argv[1]), json.load(sys.stdin)
    sys.argv = [""]
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    _prctl(_DUMPABLE, 0, 0, 0, 0)  # programs of the same user may not reach into this process
    folder = request["folder"]
    os.mkdir(folder, 0o700)
    try:
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        outcomes = [_attempt(request, test, lifeline) for test in request["tests"]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps(outcomes))


def _attempt(request: dict[str, Any], test: str, lifeline: int) -> tuple[bool, int | None, str]:
    """Run the program and one test: whether the test came to its end, exit code (None: out of time), what was said."""
    end = min(time.monotonic() + request["seconds"], request["deadline"])
    if end <= time.monotonic():
        return False, None, ""
    # A program that ends early and well has passed no test: only what comes after the test says this.
    token = secrets.token_bytes(_TOKEN_BYTES)
    with tempfile.TemporaryFile(dir=request["folder"]) as out, tempfile.TemporaryFile(dir=request["folder"]) as err:
        done, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _confine(request, [out.fileno(), err.fileno(), report])
                os._exit(_carry_out(request["program"], test, token))
            finally:
                os._exit(1)
        os.close(report)
        heard, over = b"", False
        while not over and (left := end - time.monotonic()) > 0 and len(os.listdir(request["folder"])) <= FILES:
            ready, _, _ = select.select([done, lifeline], [], [], min(left, _POLL_S))
            if lifeline in ready:
                _sweep(pid)
                sys.exit("nobody waits any more")
            part = os.read(done, _TOKEN_BYTES) if ready else b""
            # Whatever else is written there makes it wrong, however long it is.
            heard, over = (heard + part)[: 2 * _TOKEN_BYTES], bool(ready) and not part
        os.close(done)
        code = _sweep(pid)
        for file in (out, err):
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
        said, wrong = out.read().decode(errors="replace"), err.read().decode(errors="replace").strip()
    last = wrong.rpartition("\n")[2][-200:] or f"exit code {code}"
    return heard == token, code if over else None, said[-2000:] if code == 0 else last


def _sweep(pid: int) -> int:
    """Kill the child and all that it started: orphans become our children. Returns the child's exit code."""
    code = -signal.SIGKILL
    while True:
        # Again and again: what is killed may have started others since the last look.
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            found, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        code = os.waitstatus_to_exitcode(status) if found == pid else code


def _confine(request: dict[str, Any], files: list[int]) -> None:
    """Give up, in the child, what a program shall not have: descriptors, rights, time, memory, processes, threads."""
    os.setsid()
    for target, source in enumerate([os.open(os.devnull, os.O_RDWR), *files]):
        os.dup2(source, target)
    os.closerange(len(files) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(request["folder"])
    cpu = max(1, round(request["seconds"] + 0.5))
    limits = ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CORE, 0))
    for name, value in (*limits, (resource.RLIMIT_FSIZE, OUTPUT_BYTES), (resource.RLIMIT_NOFILE, FILES)):
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if os.getuid() == 0:  # the kernel counts no processes of root
        prefixes = {prefix: os.open(prefix, os.O_PATH) for prefix in {sys.base_prefix, sys.prefix}}
        # In this order: who is not root any more cannot change its groups.
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        for prefix, descriptor in prefixes.items():
            if not os.access(prefix, os.X_OK):  # a Python below /root: its modules are found by descriptor
                for paths in (sys.path, *(m.__path__ for m in sys.modules.values() if hasattr(m, "__path__"))):
                    paths[:] = [path.replace(prefix, f"/proc/self/fd/{descriptor}", 1) for path in paths]
    # The kernel wants this promise before it lets anybody but root set filters.
    _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # After the change of user, which makes the kernel forget it.
    _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _bar_files()
    _bar_calls()


def _bar_files() -> None:
    """Landlock, from Linux 5.13: files are written in the working folder and nowhere else (linux/landlock.h)."""
    version = _libc.syscall(444, None, 0, 1)
    if version < 1:
        return
    write, remove, make, truncate = 1 << 1, 1 << 5, 1 << 8, (1 << 14 if version >= 3 else 0)
    every = write | truncate | 0x1FF0 | (1 << 13 if version >= 2 else 0)  # remove, make anything; 13: move, link
    ruleset = _libc.syscall(444, struct.pack("Q", every), 8, 0)
    places = ((".", write | remove | make | truncate), (os.devnull, write))
    for place, allowed in places:
        descriptor = os.open(place, os.O_PATH)
        _libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    _libc.syscall(446, ruleset, 0)
    os.close(ruleset)


def _bar_calls() -> None:
    """A filter of system calls (linux/seccomp.h, linux/filter.h): EPERM for `_DENIED`, the end for foreign ones."""
    arch, *denied = _DENIED.get(platform.machine(), (0,))
    if not denied:
        return
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, 0), (load, 0, 0, 0)]
    lines += [(at_least, len(denied), 0, 0x40000000)]  # the same calls under the numbers of x32
    lines += [(equal, len(denied) - k, 0, number) for k, number in enumerate(denied)]
    lines += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050001)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    _prctl(_SECCOMP, 2, struct.pack("@HP", len(lines), ctypes.addressof(code)), 0, 0)


def _carry_out(program: str, test: str, token: bytes) -> int:
    """Run a program and then a test; the token goes out after the test only, so `sys.exit(0)` passes none."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    code = 0
    try:
        try:
            exec(compile(program, "<program>", "exec"), module.__dict__)
            exec(compile(test, "<test>", "exec"), module.__dict__)
            os.write(3, token)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            os.write(2, b"" if code == end.code else str(end.code).encode(errors="replace"))
        sys.stdout.flush()
    except BaseException as error:
        os.write(2, "".join(traceback.format_exception_only(error)).encode(errors="replace"))
        code = 1
    return code & 0xFF


main()
