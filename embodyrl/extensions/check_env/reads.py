"""Config sections that `check-env` uses."""

from collections.abc import Iterator
from typing import Any

from embodyrl.config.sections import no_problems
from embodyrl.errors import ConfigError
from embodyrl.plan.schema import Reads


def _problems(cfg: Any) -> Iterator[str]:
    if cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` runs simulators with random actions, and this "
            "environment verifies text replies. `embodyrl train env=... --dry-run` checks its rows and rewards."
        )
    if cfg.env.delay[1]:
        raise ConfigError(
            "env.control.latency_steps: `embodyrl check-env` checks environments without delay; set it to 0."
        )
    return no_problems(cfg)


CHECK_ENV = Reads(sections="trust env faults", plays=("train",), problems=_problems)
