"""Config sections that `check-env` uses."""

from collections.abc import Iterator
from typing import Any

from embodyrl.config.sections import no_problems
from embodyrl.errors import ConfigError
from embodyrl.plan.schema import Reads


def _problems(cfg: Any) -> Iterator[str]:
    if cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` checks only simulators, and this environment "
            "evaluates text replies. To check its rows and rewards, run `embodyrl train env=... --dry-run`."
        )
    if cfg.env.delay[1]:
        raise ConfigError(
            "env.control.latency_steps must be 0: `embodyrl check-env` checks environments without inference delay."
        )
    return no_problems(cfg)


CHECK_ENV = Reads(sections="trust env faults", plays=("train",), problems=_problems)
