"""Checks of the config against environment and policy; imports no simulator, no model, no torch."""

import logging

from embodyrl.envs import ENVS
from embodyrl.envs.reward import StepRewardSettings, reward_problems
from embodyrl.errors import ConfigError
from embodyrl.monitor.fanout import missing_loggers
from embodyrl.plan.schema import Config
from embodyrl.plan.weights import resolve_weights
from embodyrl.policies import POLICIES
from embodyrl.types import ActionKind, PolicySpec

log = logging.getLogger(__name__)
_SAMPLING = (
    *("top_k", "top_p", "repetition_penalty", "stop", "stop_token_ids"),
    *("min_new_tokens", "max_new_tokens", "frequency_penalty", "presence_penalty"),
)
_TEXT_ONLY = ("rollout.backend", "critic.path", "algorithm.reference_url")
_INERT = (
    *(f"algorithm.sampling_params.{name}" for name in _SAMPLING),
    *("actor.max_tokens_per_mbs", "eval.show_replies", "rollout.logprobs", "algorithm.reference_model"),
)
"""Text keys without an effect on policies of actions."""


def check_components(cfg: Config) -> None:
    """Validate the config against its environment and policy.

    Raises:
        CheckpointError: `algorithm.reference_path` has no weights.
        ConfigError: problems reported by a component, and missing keys of the command; one line each.
    """
    problems: list[str] = []
    if cfg.command == "check-env" and cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` plays simulators with random actions, and this "
            "environment verifies text replies. `embodyrl train env=... --dry-run` checks its rows and rewards."
        )
    if cfg.command == "serve" and cfg.reads_rows:
        raise ConfigError(f"env.env_type={cfg.env.env_type}: `embodyrl serve` serves actions, not text.")
    if cfg.has("collect") and cfg.collect.out is None:
        problems.append("collect.out is not set. Name the folder for the demonstrations, for example demos/a.")
    if cfg.command in ("sft", "dagger") and cfg.data.path is None:
        problems.append("data.path is not set. Name a folder with demonstrations; `embodyrl collect` writes one.")
    if cfg.has("runner"):
        problems += missing_loggers(cfg.runner.logger.backends)
    if cfg.trains and cfg.algorithm.reference_path is not None:
        resolve_weights(str(cfg.algorithm.reference_path), "algorithm.reference_path")
    if cfg.has("model"):
        problems += POLICIES.get(cfg.model.model_type).validate(cfg.model)
    if cfg.has("env"):
        if isinstance(getattr(cfg, "reward", None), StepRewardSettings):
            problems += reward_problems(cfg.reward)
        factory = ENVS.get(cfg.env.env_type)
        if hasattr(factory, "run_problems"):
            problems += factory.run_problems(cfg)
        problems += factory.validate(cfg.env)
    if problems:
        raise ConfigError(problems)


def key_problems(cfg: Config, policy: PolicySpec) -> list[str]:
    """Return keys that the policy does not support, one line each."""
    factory = POLICIES.get(cfg.model.model_type)
    if hasattr(factory, "run_problems"):
        return factory.run_problems(cfg, policy)
    if ActionKind.text in policy.action_kinds:
        return []
    for name in cfg.changed:
        if name in _INERT:
            log.warning("warning: %s has no effect: model '%s' chooses actions, not text.", name, policy.name)
    return [
        f"{name}: for text policies only; model '{policy.name}' outputs actions. Remove the key."
        for name in _TEXT_ONLY
        if name in cfg.changed
    ]
