"""The commands as Python functions: compose a config, then train, evaluate or collect.

>>> import embodyrl
>>> cfg = embodyrl.compose("train", "env=tabletop", "runner.max_steps=2", "launcher=inline")
>>> cfg.runner.max_steps
2
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.commands import COMMANDS
from embodyrl.config.paths import resolve_run
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_with_ckpt
from embodyrl.plan.schema import Config

if TYPE_CHECKING:
    from embodyrl.commands.collect import CollectResult
    from embodyrl.commands.eval_result import EvalResult
    from embodyrl.commands.session import OnStep
    from embodyrl.commands.sft import SftResult
    from embodyrl.commands.train import OnEval, TrainResult


def compose(command: str, *overrides: str, config_dirs: Sequence[Path] = ()) -> Config:
    """Compose and check the config of `train`, `eval`, `collect` or `sft` from command-line arguments.

    With `ckpt=RUN`, the config of run RUN is the base, as on the command line.

    Raises:
        ConfigError: one line per problem.
        CheckpointError: the path in `ckpt=` does not exist.
    """
    return load_with_ckpt(command, overrides, config_dirs=config_dirs)


def train(
    cfg: Config, *, resume: str | Path | None = None, on_step: OnStep | None = None, on_eval: OnEval | None = None
) -> TrainResult:
    """Train with reinforcement learning, or resume the run in `resume`.

    Args:
        cfg: a config of `compose("train", ...)`.
        resume: a run folder, or the name of a run in ./runs.
        on_step: called with the number of completed steps and the metrics of the last step (names as in
            metrics.jsonl); returning True ends the run: a checkpoint is written and the result is returned.
        on_eval: called with the number of completed steps and the `EvalResult` of each validation; True ends the run.

    Raises:
        ConfigError: the config has `runner.only_eval=true`; call `evaluate`.
        EmbodyError: any other failure with a known cause.
    """
    if isinstance(cfg, Config) and cfg.runner.only_eval:
        raise ConfigError("embodyrl.train needs runner.only_eval=false; to evaluate, call embodyrl.evaluate(cfg).")
    return run("train", cfg, resume=resume, on_step=on_step, on_eval=on_eval)


def evaluate(cfg: Config, *, resume: str | Path | None = None) -> EvalResult:
    """Evaluate a policy without training, or finish the evaluation in `resume`.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    return run("eval", cfg, resume=resume)


def collect(cfg: Config) -> CollectResult:
    """Collect demonstrations into `cfg.collect.out`.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    return run("collect", cfg)


def sft(cfg: Config, *, resume: str | Path | None = None, on_step: OnStep | None = None) -> SftResult:
    """Train on demonstrations or text, or resume the run in `resume`; for `on_step`, see `train`.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    return run("sft", cfg, resume=resume, on_step=on_step)


def run(command: str, cfg: Config, **kwargs: Any) -> Any:
    """Check a config, then call the command's function with the config and the additional arguments `kwargs`."""
    if not isinstance(cfg, Config):
        raise ConfigError(
            f'`{command}` needs a config, not {cfg!r:.80}: embodyrl.compose("{command}", "env=tabletop").'
        )
    if command != cfg.command and (command, cfg.command) != ("eval", "train"):
        raise ConfigError(
            f"The config was composed for `{cfg.command}`, not for `{command}`. Compose it with "
            f'embodyrl.compose("{command}", ...).'
        )
    if kwargs.get("resume") is not None:
        run_folder = kwargs["resume"] = resolve_run(str(kwargs["resume"]))
        if not (run_folder / "config.yaml").is_file():
            raise ConfigError(f"resume={run_folder} is not a run: it has no config.yaml. Correct the path.")
    # Imported only now: composing configs needs neither torch nor a simulator.
    from embodyrl.plan.checks import check_components
    from embodyrl.plan.config import check_values

    check_values(cfg)  # the config may have been changed after `compose`
    check_components(cfg)
    return COMMANDS.get(command)(cfg, **kwargs)
