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

MEMORY = 512 * 2**20
SECONDS = 4.0
_GRACE_S = 10.0
_REACHES = {
    "the network": "socket.socket()",
    "local sockets": "socket.socket(socket.AF_UNIX).bind('\\0embodyrl')",
    "other files": "open('../there', 'w').close()",
    "files outside of libraries": "open('/etc/passwd').close()",
    "other folders": "os.listdir('/proc')",
    "shared memory": "open('/dev/shm/embodyrl', 'w').close()",
    "files in memory": "os.memfd_create('embodyrl')",
    "kernel keys": "call(250 if machine == 'x86_64' else 219, 0, -3, 1)",
    "io_uring": "call(425, 1, bytes(120))",
    "userfaultfd": "call(323 if machine == 'x86_64' else 282, 1)",
    "signals to other processes": "os.kill(parent, 0)",
    "signals by descriptors": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, parent)",
    "signals by input": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "memory of other processes": "open(f'/proc/{parent}/mem', 'rb')",
    "tracing": "call(101 if machine == 'x86_64' else 117, 0x4206, parent, 0, 0)",
    "limits of other processes": "resource.prlimit(parent, resource.RLIMIT_NOFILE)",
    "priorities": "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "processors of other processes": "os.sched_setaffinity(parent, {0})",
    "scheduling": "os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0))",
}
"""Statements that try to reach a resource outside the sandbox, by resource."""
_ATTEMPTS = """
import ctypes, fcntl, os, platform, resource, socket
libc, machine, parent = ctypes.CDLL(None, use_errno=True), platform.machine(), os.getppid()
def call(number, *args):
    if libc.syscall(number, *args) < 0: raise OSError(ctypes.get_errno(), "refused")
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
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:40]!r} cannot be calculated: {error}") from error


def _value(node: ast.AST) -> float:
    """Evaluate a parsed arithmetic expression of numbers, + - * and /.

    Raises:
        ValueError: any other expression.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
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


calculate.answer_bytes = 72  # type: ignore[attr-defined]


def python_tool(code: str) -> str:
    """Run a program and return its output.

    Raises:
        ValueError: the program fails or exceeds a limit.
    """
    ended, said = run_python(code, seconds=SECONDS)
    if not ended:
        raise ValueError(said)
    return said.strip()


def run_python(source: str, *, seconds: float) -> tuple[bool, str]:
    """Run a program; return True and the end of its output, or False and the last line of its error.

    See `confinement` for the sandbox. The program has `seconds` of wall and CPU time, 512 MiB of memory and a
    temporary folder, for at most 64 files of at most 1 MiB. The program has no environment variables, input,
    network, child processes or threads.
    """
    ((_, code, said),) = _carry_out(source, [""], seconds=seconds, each=seconds)
    if code is None:
        return False, f"stopped after {seconds:g} s"
    return code == 0, said


def run_tests(program: str, tests: Sequence[str | Mapping[str, str]], *, seconds: float) -> list[bool]:
    """Run a program once for each test, all within `seconds`; return the outcome of each test.

    A test is Python code that uses names of the program and runs in a separate process, or an `input` with the expected
    `output` of the program. Trailing blanks of the output are ignored. Each test that fails because it needs an
    operation that the sandbox refuses gives a `RefusedTest` warning.
    """
    each = max(1.0, seconds / len(tests))
    outcomes = _carry_out(program, tests, seconds=seconds, each=each)
    for test, (passed, _, why) in zip(tests, outcomes, strict=True):
        if why and not passed and isinstance(test, str):
            warnings.warn(f"the test {test[:80]!r} {why}", RefusedTest, stacklevel=2)
    return [passed for passed, _, _ in outcomes]


class RefusedTest(UserWarning):
    """Warning that a test failed because the program would decide about its own result."""


def _carry_out(
    program: str, tests: Sequence[str | Mapping[str, str]], *, seconds: float, each: float
) -> list[tuple[bool, int | None, str]]:
    folder = str(Path(tempfile.gettempdir(), f"embodyrl-code-{secrets.token_hex(8)}"))
    modules = {f"{__package__}.{path.stem}": path.read_text(encoding="utf-8") for path in _MODULES}
    request: dict[str, Any] = {"program": program, "modules": modules, "folder": folder, "memory": MEMORY}
    request |= {"seconds": each, "readable": [str(path) for path in _readable() if path.exists()]}
    lifeline, ours = os.pipe()  # its other end closes with this process, however that ends
    with tempfile.TemporaryFile("w+", encoding="utf-8") as held:
        json.dump([test if isinstance(test, str) else dict(test) for test in tests], held)
        held.seek(0)
        command = [*(_bubblewrap() or (sys.executable, "-I", "-c")), _RUNNER.read_text(encoding="utf-8")]
        try:
            done = subprocess.run(
                [*command, str(lifeline), str(held.fileno())],
                env={"OPENBLAS_NUM_THREADS": "1"},  # numpy fails where it may start no thread
                input=json.dumps(request | {"deadline": time.monotonic() + seconds}),
                capture_output=True,
                text=True,
                pass_fds=[lifeline, held.fileno()],
                timeout=seconds + _GRACE_S,
                check=False,
            )
            return json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return [(False, None, "")] * len(tests)
        except ValueError:  # it was killed, by a program of the same user or for memory
            return [(False, 1, "crashed the sandbox: " + done.stderr[-200:].strip())] * len(tests)
        finally:
            os.close(ours)
            os.close(lifeline)
            shutil.rmtree(folder, ignore_errors=True)


def _readable() -> list[Path]:
    """Return the libraries that programs may read."""
    prefixes = [Path(prefix) for prefix in {sys.base_prefix, sys.prefix}]
    return [*(prefix / part for prefix in prefixes for part in ("lib", "lib64")), *map(Path, _SYSTEM.split())]


def attempts() -> str:
    """Return a program that tries to leave the sandbox, and prints each resource that it can reach."""
    each = (f"try:\n    {do}\n    print({what!r})\nexcept OSError:\n    pass\n" for what, do in _REACHES.items())
    return _ATTEMPTS + "".join(each)


def confinement() -> tuple[bool, str]:
    """Return True if programs run in separate namespaces, and a description of the confinement."""
    who = "as a separate user" if os.getuid() == 0 else "as you"
    ended, said = run_python(attempts(), seconds=SECONDS)
    reached = said.splitlines() if ended else [f"an unknown part of the system: the check failed with {said!r}"]
    beyond = f"reaching {', '.join(reached)}" if reached else "no network, files of its own only, no other process"
    if _bubblewrap():
        return True, f"bubblewrap (no network, only libraries readable) and limits, {beyond}, {who}"
    why = "may not create namespaces here" if shutil.which("bwrap") else "is not installed"
    return False, f"limits of time, memory, output and processes, {beyond}, {who}; bubblewrap {why}"


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """Return the command that runs Python source in separate namespaces; empty if namespaces are unavailable."""
    # Root keeps its rights until `sandboxed.py` drops them, and needs no user namespace, where the user `nobody` has no
    # id.
    rights = ["--unshare-ipc", "--unshare-uts", "--cap-add", "ALL"] if os.getuid() == 0 else ["--unshare-user"]
    places = f"--dev /dev --proc /proc --tmpfs {tempfile.gettempdir()} --unshare-pid --unshare-net --chdir /"
    command = [shutil.which("bwrap") or "bwrap", *places.split()]
    python = Path(sys.executable)
    started = [python.parent, python.resolve().parent, Path(sys.prefix, "pyvenv.cfg"), Path(sys.base_prefix, "bin")]
    for path in [*_readable(), *started]:
        # Folders that are created for a mount would be as private as they are outside.
        command += [word for above in [*path.parents][-2::-1] for word in ("--dir", str(above))]
        command += ["--ro-bind-try", str(path), str(path)]
    command += [*rights, "--new-session", "--as-pid-1", sys.executable, "-I", "-c"]
    try:
        tried = subprocess.run([*command, ""], capture_output=True, timeout=_GRACE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(command) if tried.returncode == 0 else ()
