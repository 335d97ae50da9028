"""Implementation of `check-env`: run the checks of the interface contract of `Env`."""

import contextlib
import multiprocessing
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from embodyrl.clock import raise_after
from embodyrl.envs.check import declaration_checks, episode_checks, rendering_checks
from embodyrl.envs.check.harness import CHECKS, Check, Harness, Violation
from embodyrl.envs.protocol import ENVS
from embodyrl.envs.settings import EnvSettings
from embodyrl.errors import format_error
from embodyrl.isolation import NoResultError
from embodyrl.process_cleanup import (
    end_children_at_exit,
    get_signal_name,
    kill_marked_children,
    mark_children,
    signal_at_parents_end,
    skip_destructors,
)

__all__ = [
    "CHECKS",
    "Finding",
    "check_env",
    "check_env_in_subprocess",
    "declaration_checks",
    "episode_checks",
    "rendering_checks",
]

_START_S, _GRACE_S = 60.0, 10.0
"""Maximum time for the child process to start, and to report a check that timed out, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check of an environment."""

    check: str
    level: str
    """Outcome: ok, warn (allowed but unusual), FAIL, or skip (a prerequisite check failed)."""
    note: str = ""
    violations: tuple[Violation, ...] = ()


def check_env(cfg: EnvSettings, *, seed: int = 0, timeout_s: float = 120.0) -> Iterator[Finding]:
    """Build two parallel environments, and run all checks in this process.

    Args:
        cfg: config as for training; the checks run episodes of the first tasks of `train.task_ids`.
        seed: seed of the episodes and of the random actions.
        timeout_s: time limit of one check; a slower check fails (main thread only).

    Yields:
        One finding per check, immediately after the check.

    Raises:
        UnknownNameError: there is no environment with this name.
    """
    # There is only one process, so an environment that divides the memory among processes may use all memory.
    harness = Harness(factory=ENVS.get(cfg.env_type), cfg=cfg, seed=seed)
    levels: dict[str, str] = {}
    try:
        for name, (check, prerequisites) in CHECKS.items():
            if missing := [
                prerequisite for prerequisite in prerequisites if levels[prerequisite] not in ("ok", "warn")
            ]:
                finding = Finding(check=name, level="skip", note=f"needs {', '.join(missing)}")
            else:
                finding = _run(name, check, harness, timeout_s)
            levels[name] = finding.level
            yield finding
    finally:
        if "env" in vars(harness) and "close" not in levels:
            harness.env.close()


def _run(name: str, check: Check, harness: Harness, timeout_s: float) -> Finding:
    harness.note, harness.violations, harness.warnings = "", [], []
    try:
        with raise_after(timeout_s, TimeoutError(f"the check did not finish within {timeout_s:g} s")):
            check(harness)
    except Exception as error:  # the code of the environment may raise any exception
        harness.violations = [Violation(name, "no error", format_error(error))]
    level = "FAIL" if harness.violations else "warn" if harness.warnings else "ok"
    violations = (*harness.violations, *harness.warnings)
    return Finding(check=name, level=level, note=harness.note, violations=violations)


def check_env_in_subprocess(cfg: EnvSettings, *, seed: int = 0, timeout_s: float = 120.0) -> Iterator[Finding]:
    """Run `check_env` in a separate process, which isolates crashes, hangs in C code and output.

    If the process crashes or hangs during a check, this check fails, and later checks are skipped.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(sender, cfg, seed, timeout_s), name="check-env", daemon=True)
    owner = f"check-env {secrets.token_hex(8)}"
    with mark_children(owner):
        child.start()
    sender.close()
    failed_check = ""
    try:
        for index, name in enumerate(CHECKS):
            if failed_check:
                yield Finding(check=name, level="skip", note=f"needs {failed_check}")
                continue
            try:
                finding = _receive(receiver, child, timeout_s, _GRACE_S if index else _START_S)
            except NoResultError as error:
                failed_check = name
                finding = Finding(check=name, level="FAIL", violations=(Violation(name, "an answer", str(error)),))
            yield finding
    finally:
        if not failed_check:
            child.join(_GRACE_S)
        child.kill()
        child.join()
        kill_marked_children(owner)
        receiver.close()


def _receive(receiver: Connection, child: SpawnProcess, timeout_s: float, grace_s: float) -> Finding:
    """Return the next finding.

    Raises:
        NoResultError: the child process exited or does not reply in time.
    """
    if not receiver.poll(timeout_s + grace_s):
        raise NoResultError(
            f"none within {timeout_s:g} s: the check hangs where Python cannot interrupt it, probably in C code"
        )
    try:
        return receiver.recv()
    except EOFError as error:
        child.join(_GRACE_S)
        exit_code = child.exitcode or 0
        exit_text = f"was killed by {get_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"
        raise NoResultError(f"the environment's process {exit_text}; see the output above") from error


def _serve(sender: Connection, cfg: EnvSettings, seed: int, timeout_s: float) -> None:
    """Run the checks in the child process and send one message per finding."""
    signal_at_parents_end(signal.SIGKILL)  # also during a check that never returns
    end_children_at_exit()
    multiprocessing.current_process().daemon = False  # an environment may start processes
    os.dup2(2, 1)  # redirects the output of C code, too
    sys.stdout = sys.stderr
    code = 1
    try:
        with contextlib.suppress(BrokenPipeError), sender:
            for finding in check_env(cfg, seed=seed, timeout_s=timeout_s):
                sender.send(finding)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        skip_destructors(code)  # threads of the environment would keep the process alive
