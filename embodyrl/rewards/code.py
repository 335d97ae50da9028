"""Reward of a program: it runs with tests in a process of its own, with limits of time, memory and files."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile

MEMORY = 512 * 2**20
SECONDS = 4.0


def code(prompt: str, response: str, reference: str) -> float:
    """Share of tests that the last code block of the response passes.

    `reference` is a JSON list of Python statements such as "assert f(2) == 4"; each one runs by itself.
    """
    blocks = re.findall(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    program = blocks[-1] if blocks else response
    tests: list[str] = json.loads(reference)
    passed = [run_python(f"{program}\n{test}\n", seconds=SECONDS / len(tests))[0] for test in tests]
    return sum(passed) / len(tests)


def run_python(source: str, *, seconds: float, memory: int = MEMORY) -> tuple[bool, str]:
    """Run a program; returns whether it ended well and what it printed (the last line of the error otherwise).

    It has `seconds` of wall and processor time, `memory` bytes, an empty folder that is removed, no environment and no
    input, and may start no process and write no file above 1 MiB. This holds off accidents, not attackers: the network
    and readable files stay within reach, so run untrusted models inside a container.
    """

    def limit() -> None:
        cpu = max(1, round(seconds + 0.5))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
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
