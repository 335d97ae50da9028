"""The commands as Python functions: compose a config, then train, evaluate, collect or fine-tune with it.

>>> import embodyrl
>>> cfg = embodyrl.compose("train", "env=tabletop", "runner.max_steps=2", "launcher=inline")
>>> cfg.runner.max_steps
2
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config.load import load_config
from embodyrl.config.schema import Config
from embodyrl.errors import ConfigError

if TYPE_CHECKING:
    from embodyrl.runtime.collect import CollectResult
    from embodyrl.runtime.evaluation import EvalResult
    from embodyrl.runtime.sft import SftResult
    from embodyrl.runtime.train import TrainResult


def compose(command: str, *overrides: str, config_dirs: Sequence[Path] = ()) -> Config:
    """Compose and check the config of `train`, `eval`, `collect` or `sft` from words as typed on the command line.

    Raises:
        ConfigError: one line per problem.
    """
    return load_config(command, overrides, config_dirs=config_dirs)


def train(cfg: Config, *, resume: Path | None = None) -> TrainResult:
    """Train by reinforcement learning, or go on with the run in `resume`.

    Raises:
        EmbodyError: every failure that has a cause to name.
    """
    _check(cfg, "train")
    from embodyrl.runtime.train import train as run

    return run(cfg, resume=resume)


def evaluate(cfg: Config, *, resume: Path | None = None) -> EvalResult:
    """Measure success without training, or finish the evaluation in `resume`.

    Raises:
        EmbodyError: every failure that has a cause to name.
    """
    _check(cfg, "eval")
    from embodyrl.runtime.evaluate import evaluate as run

    return run(cfg, resume=resume)


def collect(cfg: Config) -> CollectResult:
    """Collect demonstrations into `cfg.collect.out`.

    Raises:
        EmbodyError: every failure that has a cause to name.
    """
    _check(cfg, "collect")
    from embodyrl.runtime.collect import collect as run

    return run(cfg)


def sft(cfg: Config, *, resume: Path | None = None) -> SftResult:
    """Train on demonstrations, or go on with the run in `resume`.

    Raises:
        EmbodyError: every failure that has a cause to name.
    """
    _check(cfg, "sft")
    from embodyrl.runtime.sft import sft as run

    return run(cfg, resume=resume)


def _check(cfg: Config, command: str) -> None:
    from embodyrl.config.validate import find_conflicts, find_invalid
    from embodyrl.runtime.checks import check_components

    # A config may have been changed since it was composed.
    if problems := find_invalid(cfg) or find_conflicts(cfg):
        raise ConfigError(problems)
    check_components(cfg, command)
