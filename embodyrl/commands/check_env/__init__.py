"""`check-env`: the contract of an environment as a test that its author runs."""

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embodyrl.commands.check_env import declared, played
from embodyrl.commands.check_env.harness import CHECKS, Check, Harness, Violation
from embodyrl.envs.protocol import ENVS
from embodyrl.envs.settings import CheckedEnv
from embodyrl.errors import EmbodyError

__all__ = ["CHECKS", "Finding", "check_env", "declared", "played"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: str
    """ok, warn (allowed, and not what one expects), FAIL or skip (something it builds on failed)."""
    note: str = ""
    violations: tuple[Violation, ...] = ()


def check_env(cfg: CheckedEnv, *, seed: int = 0, timeout_s: float = 120.0) -> Iterator[Finding]:
    """Build the environment with two slots in this process and check its contract.

    Args:
        cfg: as for training; the first tasks of `train.task_ids` are played.
        seed: of the episodes and of the random actions.
        timeout_s: longest time of one check; one that takes longer fails (main thread only).

    Yields:
        One finding per check, as soon as it is known.

    Raises:
        UnknownNameError: no such environment.
    """
    # The slots here are all there are, so an environment that shares out memory may use it.
    harness = Harness(factory=ENVS.get(cfg.env_type), cfg=cfg, seed=seed)
    levels: dict[str, str] = {}
    try:
        for name, (check, needs) in CHECKS.items():
            if missing := [other for other in needs if levels[other] not in ("ok", "warn")]:
                finding = Finding(check=name, level="skip", note=f"needs {', '.join(missing)}")
            else:
                finding = _run(name, check, harness, timeout_s)
            levels[name] = finding.level
            yield finding
    finally:
        if "env" in vars(harness) and "close" not in levels:
            harness.env.close()


def _run(name: str, check: Check, harness: Harness, timeout_s: float) -> Finding:
    harness.note, harness.violations, harness.doubts = "", [], []
    try:
        with _deadline(timeout_s):
            check(harness)
    except Exception as error:  # whatever foreign code raises is what we are here to report
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = " ".join(str(error).split())
        if not isinstance(error, EmbodyError):  # ours say what is wrong and what to do
            found = f"{type(error).__name__}: {found} ({Path(where.filename).name}:{where.lineno})"
        harness.violations = [Violation(name, "no error", found)]
    level = "FAIL" if harness.violations else "warn" if harness.doubts else "ok"
    found = (*harness.violations, *harness.doubts)
    return Finding(check=name, level=level, note=harness.note, violations=found)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
