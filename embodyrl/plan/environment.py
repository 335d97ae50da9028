"""Context and spec of the environment of a run."""

from __future__ import annotations

from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.reward import StepRewardSettings
from embodyrl.errors import ConfigError
from embodyrl.plan.schema import Config
from embodyrl.plan.text import with_text_task
from embodyrl.registry import closest
from embodyrl.types import EnvSpec

ALL_SUITES = "all"


def env_context(cfg: Config) -> EnvContext:
    """Return the arguments for building a run's environment that come from config sections other than `env`.

    Raises:
        ConfigError: a file, row or reward function is invalid.
    """
    context = EnvContext(
        renders_images=not cfg.has_evaluations or cfg.video != "none",
        reward=cfg.reward if isinstance(cfg.reward, StepRewardSettings) else None,
        chunk=cfg.model.num_action_chunks if cfg.has("model") else 0,
        suites=_find_additional_suites(cfg) if cfg.has_evaluations else (),
    )
    return with_text_task(cfg, context) if cfg.reads_rows else context


def env_spec(cfg: Config) -> EnvSpec:
    """Return the `EnvSpec` of a run's environment."""
    return ENVS.get(cfg.env.env_type).spec(cfg.env, env_context(cfg))


def _find_additional_suites(cfg: Config) -> tuple[str, ...]:
    """Return the suites of `runner.val_suites`, in the environment's order and without the configured suite.

    Raises:
        ConfigError: the environment has no such suite.
    """
    requested, factory = cfg.runner.val_suites, ENVS.get(cfg.env.env_type)
    if not requested:
        return ()
    available: tuple[str, ...] = getattr(factory, "suites", lambda _: ())(cfg.env)
    if requested == [ALL_SUITES] and available:
        return available
    main_suite = getattr(factory, "get_configured_suite", lambda _: None)(cfg.env)
    suite_names = ", ".join(available) or "no further suites"
    if unknown := [name for name in requested if name not in (*available, main_suite)]:
        raise ConfigError(
            f"runner.val_suites: '{unknown[0]}' is not a suite of env '{cfg.env.env_type}'."
            f"{closest(unknown[0], available)} Known: {suite_names}. Remove this suite, or choose another env."
        )
    return tuple(name for name in available if name in requested)
