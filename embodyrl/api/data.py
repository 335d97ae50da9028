"""The commands `collect` and `sft` as Python functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.api.commands import run
from embodyrl.plan.schema import Config

if TYPE_CHECKING:
    from embodyrl.commands.collect import CollectResult
    from embodyrl.commands.session import OnStep
    from embodyrl.commands.sft import SftResult


def collect(cfg: Config) -> CollectResult:
    """Collect demonstrations into `cfg.collect.out`.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    return run("collect", cfg)


def sft(cfg: Config, *, resume: Path | None = None, on_step: OnStep | None = None) -> SftResult:
    """Train on demonstrations or text, or resume the run in `resume`; for `on_step`, see `train`.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    return run("sft", cfg, resume=resume, on_step=on_step)
