"""Execution of model output: arithmetic expressions without `eval`, and programs in a restricted process."""

import ast
import functools
import json
import operator
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.findings import Finding

MEMORY_BYTES, FOLDER_BYTES = 512 * 2**20, 128 * 2**20
TIMEOUT_S = 4.0
_GRACE_S = 10.0
_ESCAPE_STATEMENTS = {
    "the network": "socket.socket()",
    "local sockets": "socket.socket(socket.AF_UNIX).bind('\\0embodyrl')",
    "other files": "open('../there', 'w').close()",
    "files outside of libraries": "open('/etc/passwd').close()",
    "other folders": "os.listdir('/proc')",
    "shared memory": "open('/dev/shm/embodyrl', 'w').close()",
    "files in memory": "os.memfd_create('embodyrl')",
    "kernel keys": "call((250, 219), 0, -3, 1)",
    "io_uring": "call((425, 425), 1, bytes(120))",
    "userfaultfd": "call((323, 282), 1)",
    "signals to other processes": "os.kill(parent, 0)",
    "signals through file descriptors": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, parent)",
    "signals on input": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "memory of other processes": "open(f'/proc/{parent}/mem', 'rb')",
    "tracing": "call((101, 117), 0x4206, parent, 0, 0)",
    "limits of other processes": "resource.prlimit(parent, resource.RLIMIT_NOFILE)",
    "priorities": "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "CPU affinity of other processes": "os.sched_setaffinity(parent, {0})",
    "scheduling": "os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0))",
    "datagrams to local sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "times of other files": "os.utime('..')",
    "owners of other files": "os.chown('..', -1, -1)",
    "attributes of other files": "os.setxattr('..', 'user.embodyrl', b'')",
    "names of other files": "call((294, 26), 0)",
    "use of folders by others": "fcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, fcntl.DN_DELETE)",
    "use of files by others": "fcntl.fcntl(os.open('leased', os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "messages through shared pages": "call((202, 98), ctypes.create_string_buffer(8), 1, 1)",
    "locks of other files": "fcntl.flock(os.pipe()[0], fcntl.LOCK_SH)",
    "disk space beyond the size of files": "call((285, 47), os.open('file', os.O_CREAT | os.O_RDWR), 1, 0, 1 << 21)",
    "pages of pipes": "call((278, 75), os.pipe()[1], None, 0, 0)",
    "asynchronous I/O": "call((206, 0), 1, ctypes.create_string_buffer(8))",
    "timers": "call((222, 107), 1, None, ctypes.create_string_buffer(8))",
    "System V memory": "call((31, 195), 0, 3, ctypes.create_string_buffer(256))",
    "System V semaphores": "call((66, 191), 0, 0, 3, ctypes.create_string_buffer(256))",
    "System V queues": "call((71, 187), 0, 3, ctypes.create_string_buffer(256))",
    "disk space reserved by ioctl": "fcntl.ioctl(os.open('file', os.O_CREAT | os.O_RDWR), 0x4030582A, "
    "bytes(16) + (1 << 21).to_bytes(8, 'little') + bytes(24))",
    "lengths of other files": "open('file', 'w').close(); os.truncate('file', 0)",
    "contents of readable files": "os.open('file', os.O_CREAT | os.O_TRUNC)",
    "contents of other files": "os.open('file', os.O_CREAT | os.O_TRUNC | 3)",
    "files sent through sockets": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
    "eviction of cached files": "os.posix_fadvise(os.open('file', os.O_CREAT), 0, 0, os.POSIX_FADV_DONTNEED)",
    "eviction of mapped pages": "call((28, 233), 0, 0, 21)",
    "reads with flags": "os.preadv(os.open('file', os.O_CREAT | os.O_RDWR), [bytearray(1)], 0, os.RWF_HIPRI)",
    "cached pages": "call((27, 232), 0, 0, None)",
    "mounts of the host": "call((458, 458), (24).to_bytes(8, 'little') + b'\\xff' * 8 + bytes(8), bytes(8), 1, 0)",
    "Landlock rules": "call((444, 444), None, 0, 1)",
    "processes that outlive the sandbox": "call((157, 167), 1, 0)",
}
"""Statements that try to reach a resource outside the sandbox, by resource."""
_ESCAPE_PRELUDE = """
import ctypes, fcntl, os, platform, resource, socket
libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
def call(numbers, *args):
    if libc.syscall(numbers[platform.machine() != "x86_64"], *args) < 0: raise OSError(ctypes.get_errno(), "refused")
"""
_RUNNER, *_MODULES = (
    Path(__file__).with_name(f"sandboxed{name}.py") for name in ("", "_objects", "_values", "_calls", "_tests")
)
_SYSTEM = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache /etc/localtime /usr/share/zoneinfo"

_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> float:
    """Return the value of an expression of numbers and + - * /.

    Raises:
        ValueError: the text contains anything else, or its value is undefined.
    """
    try:
        return _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:40]!r} cannot be calculated: {error}") from error


def _evaluate_node(node: ast.AST) -> float:
    """Evaluate a parsed arithmetic expression of numbers, + - * and /.

    Raises:
        ValueError: any other expression.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate_node(node.left), _evaluate_node(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_node(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    raise ValueError(f"'{ast.unparse(node)[:60]}' is not allowed; use numbers and + - * /")


def calculate(expression: str) -> str:
    """Return the value of an expression (see `evaluate`) as text: integers below 2^53 in full, else six digits.

    Raises:
        ValueError: the expression is invalid; the message is short because it is added to the prompt.
    """
    try:
        value = evaluate(expression)
    except ValueError as error:
        raise ValueError("cannot be calculated: use numbers and + - * /") from error
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"


calculate.answer_bytes = 72  # type: ignore[attr-defined]  # maximum size of an answer


def python_tool(code: str) -> str:
    """Run a program and return its output.

    Raises:
        ValueError: the program fails or exceeds a limit.
    """
    succeeded, output = run_python(code, seconds=TIMEOUT_S)
    if not succeeded:
        raise ValueError(output)
    return output.strip()


def run_python(source: str, *, seconds: float) -> tuple[bool, str]:
    """Run a program; return True and the end of its output, or False and the last line of its error.

    See `probe_sandbox` for the sandbox. The program has `seconds` of wall and CPU time, 512 MiB of memory and a
    temporary folder for at most 64 files of at most 1 MiB each. The program has no environment variables, input,
    network, child processes or threads.
    """
    ((_, exit_code, output),) = _execute(source, [""], seconds=seconds, seconds_per_test=seconds)
    if exit_code is None:
        return False, f"stopped after {seconds:g} s"
    return exit_code == 0, output


def run_tests(program: str, tests: Sequence[str | Mapping[str, str]], *, seconds: float) -> list[bool]:
    """Run a program once for each test, all within `seconds`; return the outcome of each test.

    A test is Python code that uses names of the program and runs in a separate process, or an `input` with the expected
    `output` of the program. Trailing whitespace of the output is ignored. Each test that fails because it needs an
    operation that the sandbox rejects gives a `RejectedTest` warning.
    """
    seconds_per_test = max(1.0, seconds / len(tests))
    outcomes = _execute(program, tests, seconds=seconds, seconds_per_test=seconds_per_test)
    for test, (passed, _, reason) in zip(tests, outcomes, strict=True):
        if reason and not passed and isinstance(test, str):
            warnings.warn(f"the test {test[:80]!r} {reason}", RejectedTest, stacklevel=2)
    return [passed for passed, _, _ in outcomes]


class RejectedTest(UserWarning):
    """Warning that a test failed because the program could determine the result of the test."""


def _execute(
    program: str, tests: Sequence[str | Mapping[str, str]], *, seconds: float, seconds_per_test: float
) -> list[tuple[bool, int | None, str]]:
    folder = str(Path(tempfile.gettempdir(), f"embodyrl-code-{secrets.token_hex(8)}"))
    modules = {f"{__package__}.{path.stem}": path.read_text(encoding="utf-8") for path in _MODULES}
    readable = [str(path) for path in _list_readable_paths() if path.exists()]
    request: dict[str, Any] = {"program": program, "modules": modules, "folder": folder, "memory": MEMORY_BYTES}
    request |= {"seconds": seconds_per_test, "readable": readable}
    lifeline, write_end = os.pipe()  # the write end closes when this process ends for any reason
    with tempfile.TemporaryFile("w+", encoding="utf-8") as tests_file:
        json.dump([test if isinstance(test, str) else dict(test) for test in tests], tests_file)
        tests_file.seek(0)
        command = [*(_get_bubblewrap_command() or (sys.executable, "-I", "-c")), _RUNNER.read_text(encoding="utf-8")]
        try:
            process = subprocess.run(
                [*command, str(lifeline), str(tests_file.fileno())],
                env={"OPENBLAS_NUM_THREADS": "1"},  # numpy fails if it cannot start threads
                input=json.dumps(request | {"deadline": time.monotonic() + seconds}),
                capture_output=True,
                text=True,
                start_new_session=True,  # survives a signal to this process group, to remove the folder
                pass_fds=[lifeline, tests_file.fileno()],
                timeout=seconds + _GRACE_S,
                check=False,
            )
            return json.loads(process.stdout)
        except subprocess.TimeoutExpired:
            return [(False, None, "")] * len(tests)
        except ValueError:  # the sandbox was killed by a program of the same user, or due to lack of memory
            return [(False, 1, "crashed the sandbox: " + process.stderr[-200:].strip())] * len(tests)
        finally:
            os.close(write_end)
            os.close(lifeline)
            shutil.rmtree(folder, ignore_errors=True)


def _list_readable_paths() -> list[Path]:
    """Return the libraries that programs may read."""
    prefixes = [Path(prefix) for prefix in {sys.base_prefix, sys.prefix}]
    return [*(prefix / part for prefix in prefixes for part in ("lib", "lib64")), *map(Path, _SYSTEM.split())]


def build_escape_program() -> str:
    """Return a program that tries to leave the sandbox, and prints each resource that it can reach."""
    blocks = (
        f"try:\n    {statement}\n    print({resource!r})\nexcept OSError:\n    pass\n"
        for resource, statement in _ESCAPE_STATEMENTS.items()
    )
    return _ESCAPE_PRELUDE + "".join(blocks)


def probe_sandbox() -> Finding:
    """Check how generated programs (reward `code`, tool `python`) are confined, for `embodyrl doctor`."""
    user = "as a separate user" if os.getuid() == 0 else "as you"
    succeeded, output = run_python(build_escape_program(), seconds=TIMEOUT_S)
    reached = output.splitlines() if succeeded else [f"an unknown part of the system: the check failed with {output!r}"]
    access = f"reaching {', '.join(reached)}" if reached else "no network, only its own files, no other process"
    if _get_bubblewrap_command():
        text = f"bubblewrap (no network, only libraries readable) and limits, {access}, {user}"
        return Finding("sandbox", "ok", text)
    reason = "may not create namespaces here" if shutil.which("bwrap") else "is not installed"
    text = f"limits of time, memory, output and processes, {access}, {user}; bubblewrap {reason}"
    return Finding("sandbox", "warn", text, "apt-get install bubblewrap")


@functools.cache
def _get_bubblewrap_command() -> tuple[str, ...]:
    """Return the command that runs Python source in separate namespaces; empty if namespaces are unavailable."""
    # Root keeps its rights until `sandboxed.py` drops them. Root needs no user namespace, in which the user `nobody`
    # would have no id.
    rights = ["--unshare-uts", "--cap-add", "ALL"] if os.getuid() == 0 else ["--unshare-user"]
    # The files of programs are in memory, also files that a program removed but still maps.
    mounts = f"--dev /dev --proc /proc --size {FOLDER_BYTES} --tmpfs {tempfile.gettempdir()}"
    command = [shutil.which("bwrap") or "bwrap", *mounts.split(), "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    python = Path(sys.executable)
    environment = [Path(sys.prefix, "pyvenv.cfg"), Path(sys.base_prefix, "bin")]
    for path in [*_list_readable_paths(), python.parent, python.resolve().parent, *environment]:
        # Create parent folders, because folders created by a mount would have the private permissions of the original.
        command += [argument for parent in [*path.parents][-2::-1] for argument in ("--dir", str(parent))]
        command += ["--ro-bind-try", str(path), str(path)]
    command += [*rights, "--chdir", "/", "--new-session", "--as-pid-1", sys.executable, "-I", "-c"]
    index = command.index("--size")
    for candidate in (command, command[:index] + command[index + 2 :]):  # bubblewrap before 0.7 has no --size
        try:
            process = subprocess.run([*candidate, ""], capture_output=True, timeout=_GRACE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        if process.returncode == 0:
            return tuple(candidate)
    return ()
