"""`check_env` in a process of its own: what crashes, hangs in C or prints there does so to itself."""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from embodyrl.commands.check_env import CHECKS, Finding, check_env
from embodyrl.commands.check_env.harness import Violation
from embodyrl.envs.settings import CheckedEnv

_START_S, _GRACE_S = 60.0, 10.0
"""For the start of the process, and for its own report that a check took too long."""


def check_env_apart(cfg: CheckedEnv, *, seed: int = 0, timeout_s: float = 120.0) -> Iterator[Finding]:
    """As `check_env`; the environment's standard output goes to standard error.

    A check in which the process dies or never answers fails, and those after it are skipped.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(theirs, cfg, seed, timeout_s), name="check-env")
    child.start()
    theirs.close()
    broken = ""
    try:
        for place, name in enumerate(CHECKS):
            if broken:
                yield Finding(check=name, level="skip", note=f"needs {broken}")
                continue
            found = _next(ours, child, name, timeout_s, _GRACE_S if place else _START_S)
            broken = name if isinstance(found, Violation) else ""
            yield Finding(check=name, level="FAIL", violations=(found,)) if isinstance(found, Violation) else found
    finally:
        if not broken:
            child.join(_GRACE_S)
        child.kill()
        child.join()
        ours.close()


def _next(ours: Connection, child: SpawnProcess, name: str, timeout_s: float, grace_s: float) -> Finding | Violation:
    """The next finding, or why there is none."""
    if not ours.poll(timeout_s + grace_s):
        late = f"none within {timeout_s:g} s: it hangs where Python cannot interrupt it, in C code most likely"
        return Violation(name, "an answer", late)
    try:
        return ours.recv()
    except EOFError:
        child.join(_GRACE_S)
        code = child.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended itself with exit code {code}"
        return Violation(name, "an answer", f"the environment's process {how}; what it printed stands above")


def _serve(theirs: Connection, cfg: CheckedEnv, seed: int, timeout_s: float) -> None:
    """The process: one message per finding."""
    os.dup2(2, 1)  # also what C code prints
    sys.stdout = sys.stderr
    with contextlib.suppress(BrokenPipeError), theirs:
        for finding in check_env(cfg, seed=seed, timeout_s=timeout_s):
            theirs.send(finding)
