"""Sections of the config that `serve` uses."""

from collections.abc import Iterator
from typing import Any

from embodyrl.config.sections import no_problems
from embodyrl.errors import ConfigError
from embodyrl.plan.schema import Reads


def _problems(cfg: Any) -> Iterator[str]:
    if cfg.reads_rows:
        raise ConfigError(f"env.env_type={cfg.env.env_type}: `embodyrl serve` serves actions, not text.")
    return no_problems(cfg)


SERVE = Reads(
    sections="trust model ckpt env", dry_run="embodyrl.extensions.serving.serve:server_facts", problems=_problems
)
