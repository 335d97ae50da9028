"""`check-env`: the contract of an environment as a test that its author runs."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embodyrl.envs import check_episodes as episodes
from embodyrl.envs import check_rules as rules
from embodyrl.envs.check_harness import Harness, Violation
from embodyrl.envs.protocol import ENVS
from embodyrl.envs.settings import CheckedEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: str
    """ok, FAIL or skip (something it builds on failed)."""
    note: str = ""
    violations: tuple[Violation, ...] = ()


_Check = Callable[[Harness], Iterator[Violation] | None]

CHECKS: dict[str, tuple[_Check, str]] = {
    check.__name__.removeprefix("check_"): (check, needs)
    for check, needs in (
        (rules.check_factory, ""),
        (rules.check_light, ""),
        (rules.check_spec, ""),
        (episodes.check_make, "spec"),
        (episodes.check_reset, "make"),
        (episodes.check_observe, "reset"),
        (episodes.check_instruction, "reset"),
        (episodes.check_reset_ids_differ, "observe"),
        (episodes.check_step, "observe"),
        (episodes.check_reset_repeats, "step"),
        (episodes.check_expert, "step"),
        (episodes.check_flags, "step"),
        (episodes.check_time_limit, "flags"),
        (episodes.check_over, "time_limit"),
        (episodes.check_ignore_terminations, "time_limit"),
        (episodes.check_repeatable, "reset_repeats step"),
        (episodes.check_slots, "repeatable"),
        (episodes.check_expert_replays, "repeatable expert flags"),
        (episodes.check_image_range, "step"),
        (episodes.check_render, "step"),
        (episodes.check_speed, "time_limit"),
        (episodes.check_close, "make"),
    )
}
"""Each check with the names of those it builds on, in the order in which they run."""


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
            if missing := [other for other in needs.split() if levels[other] != "ok"]:
                finding = Finding(check=name, level="skip", note=f"needs {', '.join(missing)}")
            else:
                finding = _run(name, check, harness, timeout_s)
            levels[name] = finding.level
            yield finding
    finally:
        if "env" in vars(harness) and "close" not in levels:
            harness.env.close()


def _run(name: str, check: _Check, harness: Harness, timeout_s: float) -> Finding:
    harness.note = ""
    try:
        with _deadline(timeout_s):
            violations = tuple(check(harness) or ())
    except Exception as error:  # whatever foreign code raises is what we are here to report
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        found = f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
        violations = (Violation(name, "no error", found),)
    return Finding(check=name, level="FAIL" if violations else "ok", note=harness.note, violations=violations)


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
