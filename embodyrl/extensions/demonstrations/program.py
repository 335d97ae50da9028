"""The commands `collect` and `sft` as Python functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.plan.schema import Config
from embodyrl.program.commands import run

if TYPE_CHECKING:
    from embodyrl.commands.session import OnStep
    from embodyrl.extensions.demonstrations.collect import CollectResult
    from embodyrl.extensions.demonstrations.sft import SftResult


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
