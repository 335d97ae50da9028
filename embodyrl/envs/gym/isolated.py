"""Inspection of Gymnasium environments in a separate process, because user code may crash or hang."""

import multiprocessing
import sys
from dataclasses import replace

from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spec import describe_in_process
from embodyrl.errors import EnvError
from embodyrl.isolation import NoResultError, call_isolated, wait_for_leftovers
from embodyrl.types import EnvSpec

_BUILD_S = 600.0
"""Time limit for building and testing one environment; simulators that load assets take minutes."""
_CLOSE_TIMEOUT_S = 1.0
"""Time limit for threads and child processes to end after `close`."""


def describe(cfg: GymSettings, renders: bool) -> EnvSpec:
    """Return the spec of an environment; a separate process computes it, unless this process has loaded the code.

    Raises:
        EnvError: the environment's first steps violate Gymnasium's interface, crash or hang.
    """
    if _is_loaded(cfg):
        return describe_in_process(cfg, renders)
    try:
        return call_isolated(f"{__name__}:describe_and_check_close", cfg, renders, kind=EnvSpec, timeout_s=_BUILD_S)
    except NoResultError as error:
        raise EnvError(
            f"env.id={cfg.id}: the test process, which builds, resets and steps the environment once, "
            f"failed: {error}. Fix the environment; --traceback shows the log of the process."
        ) from error


def _is_loaded(cfg: GymSettings) -> bool:
    """Return True if this process is a worker, or has imported the code of the environment."""
    module, _, name = str(cfg.id).rpartition(":")
    if multiprocessing.parent_process() is not None or module in sys.modules:
        return True
    return not module and "gymnasium" in sys.modules and name in sys.modules["gymnasium"].registry


def describe_and_check_close(cfg: GymSettings, renders: bool) -> EnvSpec:
    """Return the spec of an environment, with a warning if threads or processes outlive its `close`."""
    spec = describe_in_process(cfg, renders)
    remaining = wait_for_leftovers(_CLOSE_TIMEOUT_S)
    warning = f"{remaining} did not end with the environment's close(); fix: stop threads and processes in close()"
    return replace(spec, warnings=(*spec.warnings, warning)) if remaining else spec
