"""Checks that join the config with the chosen environment and policy; no simulator, no model, no torch."""

from embodyrl.envs import ENVS
from embodyrl.envs.reward import StepRewardSettings, reward_problems
from embodyrl.errors import ConfigError
from embodyrl.extensions.text.plan import text_problems
from embodyrl.monitor.fanout import missing_loggers
from embodyrl.plan.roots import (
    ActingConfig,
    CheckConfig,
    CollectConfig,
    PolicyConfig,
    Root,
    RunConfig,
    ServeConfig,
    SftConfig,
)
from embodyrl.policies import POLICIES


def check_components(cfg: Root) -> None:
    """Let the chosen environment and policy judge their part of the config.

    Raises:
        ConfigError: problems that a component reports, and keys that the command cannot do without; one line each.
    """
    problems: list[str] = []
    if isinstance(cfg, CheckConfig) and cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` plays simulators with random actions, and this "
            "environment judges written answers. `embodyrl train env=... --dry-run` checks its rows and rewards."
        )
    if isinstance(cfg, ServeConfig) and cfg.reads_rows:
        raise ConfigError(f"env.env_type={cfg.env.env_type}: `embodyrl serve` answers with actions, not with words.")
    if isinstance(cfg, CollectConfig) and cfg.collect.out is None:
        problems.append("collect.out is not set: it wants a folder to write demonstrations to, for example demos/a.")
    if isinstance(cfg, SftConfig) and cfg.data.path is None:
        problems.append("data.path is not set: it wants a folder with demonstrations; `embodyrl collect` writes one.")
    if isinstance(cfg, RunConfig):
        problems += missing_loggers(cfg.runner.logger.backends)
    if isinstance(cfg, PolicyConfig):
        problems += POLICIES.get(cfg.model.model_type).validate(cfg.model)
    if isinstance(cfg, ActingConfig | CheckConfig | ServeConfig):
        if cfg.reads_rows:
            assert isinstance(cfg, ActingConfig)
            problems += text_problems(cfg, cfg.algorithm.sampling_params.max_new_tokens)
        elif isinstance(getattr(cfg, "reward", None), StepRewardSettings):
            problems += reward_problems(cfg.reward)
        problems += ENVS.get(cfg.env.env_type).validate(cfg.env)
    if problems:
        raise ConfigError(problems)
