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
    "other files": "open('../there', 'w').close()",
    "files outside of libraries": "open('/etc/passwd').close()",
    "other folders": "os.listdir('/proc')",
    "shared memory": "open('/dev/shm/embodyrl', 'w').close()",
    "files in memory": "os.memfd_create('embodyrl')",
    "signals to other processes": "os.kill(parent, 0)",
    "memory of other processes": "open(f'/proc/{parent}/mem', 'rb')",
    "limits of other processes": "resource.prlimit(parent, resource.RLIMIT_NOFILE)",
}
"""Statements that try to reach a resource outside the sandbox, by resource."""
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
    ((code, said),) = _carry_out(source, [{"input": ""}], seconds=seconds)
    if code is None:
        return False, f"stopped after {seconds:g} s"
    return code == 0, said[-2000:]


def run_tests(program: str, tests: Sequence[str | Mapping[str, str]], *, seconds: float) -> list[bool]:
    """Run a program once for each test, all within `seconds`; return the outcome of each test.

    A test is Python code that uses names of the program and runs in a separate process, or an `input` with the expected
    `output` of the program. Trailing blanks of the output are ignored. Each test that fails because it needs an
    operation that the sandbox refuses gives a `RefusedTest` warning.
    """
    outcomes = _carry_out(program, tests, seconds=seconds)
    passed = []
    for test, (code, said) in zip(tests, outcomes, strict=True):
        passed.append(code == 0 and (isinstance(test, str) or _lines(said) == _lines(test["output"])))
        if code and said and isinstance(test, str):
            warnings.warn(f"the test {test[:80]!r} {said}", RefusedTest, stacklevel=2)
    return passed


def _lines(text: str) -> list[str]:
    """Return the lines of a text without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


class RefusedTest(UserWarning):
    """Warning that a test failed because the program would decide about its own result."""


def _carry_out(
    program: str, tests: Sequence[str | Mapping[str, str]], *, seconds: float
) -> list[tuple[int | None, str]]:
    """Return the exit code (None: timeout) and the output, or the reason for a failure, of each test."""
    folder = str(Path(tempfile.gettempdir(), f"embodyrl-code-{secrets.token_hex(8)}"))
    modules = {f"{__package__}.{path.stem}": path.read_text(encoding="utf-8") for path in _MODULES}
    request: dict[str, Any] = {"program": program, "modules": modules, "folder": folder, "memory": MEMORY}
    request |= {
        "seconds": max(1.0, seconds / len(tests)),
        "readable": [str(path) for path in _readable() if path.exists()],
    }
    # Programs inherit the memory of the process that reads the request, and no tests or expected outputs with it.
    request["inputs"] = [None if isinstance(test, str) else test["input"] for test in tests]
    lifeline, ours = os.pipe()  # its other end closes with this process, however that ends
    with tempfile.TemporaryFile("w+", encoding="utf-8") as held:
        json.dump([test if isinstance(test, str) else None for test in tests], held)
        held.flush()
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
            outcomes = [json.loads(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]
        except subprocess.TimeoutExpired:
            return [(None, "")] * len(tests)
        finally:
            os.close(ours)
            os.close(lifeline)
            shutil.rmtree(folder, ignore_errors=True)
    if len(outcomes) == len(tests):
        return outcomes
    # It was killed, by a program of the same user or for memory.
    return [(1, "crashed the sandbox: " + done.stderr[-200:].strip())] * len(tests)


def _readable() -> list[Path]:
    """Return the libraries that programs may read."""
    prefixes = [Path(prefix) for prefix in {sys.base_prefix, sys.prefix}]
    return [*(prefix / part for prefix in prefixes for part in ("lib", "lib64")), *map(Path, _SYSTEM.split())]


def attempts() -> str:
    """Return a program that tries to leave the sandbox, and prints each resource that it can reach."""
    each = (f"try:\n    {do}\n    print({what!r})\nexcept OSError:\n    pass\n" for what, do in _REACHES.items())
    return "import os, resource, socket\nparent = os.getppid()\n" + "".join(each)


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
