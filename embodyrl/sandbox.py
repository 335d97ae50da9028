"""What a model wrote is carried out here: arithmetic without evaluation, programs in a process with limits."""

import ast
import operator
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable

MEMORY = 512 * 2**20
SECONDS = 4.0

_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> float:
    """Value of an expression of numbers and + - * /.

    Raises:
        ValueError: it is no such expression, or has no value.
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:40]!r} cannot be calculated: {error}") from error


def _value(node: ast.AST) -> float:
    """Value of + - * / on numbers.

    Raises:
        ValueError: anything else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    raise ValueError(f"no arithmetic: {ast.dump(node)[:60]}")


def calculate(expression: str) -> str:
    """Write the value of an expression, whole numbers without a point (see `evaluate`)."""
    value = evaluate(expression)
    return str(int(value)) if value.is_integer() else f"{value:.6g}"


def python_tool(source: str) -> str:
    """Return what a program prints.

    Raises:
        ValueError: it fails or reaches a limit.
    """
    ended, said = run_python(source, seconds=SECONDS)
    if not ended:
        raise ValueError(said)
    return said.strip()


def run_python(source: str, *, seconds: float) -> tuple[bool, str]:
    """Run a program; returns whether it ended well and what it printed (the last line of the error otherwise).

    It has `seconds` of wall and processor time, 512 MiB, an empty folder that is removed, no environment and no
    input, and may start no process and write no file above 1 MiB. This holds off accidents, not attackers: the network
    and readable files stay within reach, so run untrusted models inside a container.
    """

    def limit() -> None:
        cpu = max(1, round(seconds + 0.5))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))

    with tempfile.TemporaryDirectory(prefix="embodyrl-code-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", source],
                cwd=folder,
                env={},
                input="",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                preexec_fn=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"stopped after {seconds:g} s"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.returncode == 0, done.stdout[-2000:] if done.returncode == 0 else last[-200:]
