"""`check-env`: the contract of an environment as a test that its author runs."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from embodyrl.config.schema import EnvConfig
from embodyrl.envs import check_episodes as episodes
from embodyrl.envs import check_rules as rules
from embodyrl.envs.check_rig import SLOTS, Rig, Violation
from embodyrl.envs.protocol import ENVS


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: str
    """ok, FAIL or skip (something it builds on failed)."""
    note: str = ""
    violations: tuple[Violation, ...] = ()


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    run: Callable[[Rig], Iterator[Violation]]
    needs: tuple[str, ...] = ()


CHECKS = (
    _Check("factory", rules.check_factory),
    _Check("light", rules.check_light),
    _Check("spec", rules.check_spec),
    _Check("make", episodes.check_make, ("spec",)),
    _Check("reset", episodes.check_reset, ("make",)),
    _Check("observe", episodes.check_observe, ("reset",)),
    _Check("instruction", episodes.check_instruction, ("reset",)),
    _Check("reset_ids_differ", episodes.check_reset_ids_differ, ("observe",)),
    _Check("step", episodes.check_step, ("observe",)),
    _Check("reset_repeats", episodes.check_reset_repeats, ("step",)),
    _Check("expert", episodes.check_expert, ("step",)),
    _Check("flags", episodes.check_flags, ("step",)),
    _Check("time_limit", episodes.check_time_limit, ("flags",)),
    _Check("over", episodes.check_over, ("time_limit",)),
    _Check("ignore_terminations", episodes.check_ignore_terminations, ("time_limit",)),
    _Check("repeatable", episodes.check_repeatable, ("reset_repeats", "step")),
    _Check("slots", episodes.check_slots, ("repeatable",)),
    _Check("expert_replays", episodes.check_expert_replays, ("repeatable", "expert", "flags")),
    _Check("image_range", episodes.check_image_range, ("step",)),
    _Check("render", episodes.check_render, ("step",)),
    _Check("speed", episodes.check_speed, ("time_limit",)),
    _Check("close", episodes.check_close, ("make",)),
)
"""In the order in which they run."""


def check_env(cfg: EnvConfig, *, seed: int = 0, timeout_s: float = 120.0) -> Iterator[Finding]:
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
    few = {split: replace(getattr(cfg, split), total_num_envs=SLOTS) for split in ("train", "eval")}
    rig = Rig(factory=ENVS.get(cfg.env_type), cfg=replace(cfg, **few), seed=seed)
    levels: dict[str, str] = {}
    try:
        for check in CHECKS:
            missing = [name for name in check.needs if levels[name] != "ok"]
            if missing:
                finding = Finding(check=check.name, level="skip", note=f"needs {', '.join(missing)}")
            else:
                finding = _run(check, rig, timeout_s)
            levels[check.name] = finding.level
            yield finding
    finally:
        if rig.made and levels.get("close") is None:
            rig.env.close()


def _run(check: _Check, rig: Rig, timeout_s: float) -> Finding:
    rig.note = ""
    try:
        with _deadline(timeout_s):
            violations = tuple(check.run(rig))
    except Exception as error:  # whatever foreign code raises is what we are here to report
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        found = f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
        violations = (Violation(field=check.name, expected="no error", found=found),)
    return Finding(check=check.name, level="FAIL" if violations else "ok", note=rig.note, violations=violations)


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
