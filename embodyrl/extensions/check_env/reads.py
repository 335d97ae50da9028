"""Sections of the config that `check-env` uses."""

from collections.abc import Iterator
from typing import Any

from embodyrl.plan.schema import Reads


def _problems(cfg: Any) -> Iterator[str]:
    if cfg.reads_rows:
        yield (
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` runs simulators with random actions, and this "
            "environment verifies text replies. `embodyrl train env=... --dry-run` checks its rows and rewards."
        )


CHECK_ENV = Reads(sections="env faults", plays=("train",), problems=_problems)
