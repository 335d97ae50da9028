"""Checks that join the config with the chosen environment, policy and algorithm; no simulator, no model, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from embodyrl import algorithms
from embodyrl.config.keys import all_keys, leaves, spell
from embodyrl.config.schema import Config
from embodyrl.envs import ENVS
from embodyrl.errors import ConfigError, UnknownNameError
from embodyrl.policies import POLICIES

_LOOP_ENV = frozenset({"env_type", "train", "eval"})
_LOOP_MODEL = frozenset({"model_type"})
"""Keys that the training loop itself reads, whatever component is chosen."""


def check_components(cfg: Config) -> None:
    """Let the chosen environment, policy and algorithm judge their part of the config.

    Raises:
        ConfigError: unknown component names, problems that a component reports, and keys that differ from their
            default although the chosen component does not read them; one line each.
    """
    problems = [*_env(cfg), *_model(cfg), *_algorithm(cfg)]
    if problems:
        raise ConfigError(problems)


def _env(cfg: Config) -> list[str]:
    try:
        factory = ENVS.get(cfg.env.env_type)
    except ConfigError as error:
        return error.problems
    owner = f"env_type '{cfg.env.env_type}'"
    return [*factory.validate(cfg.env), *_ignored(cfg, "env", owner, _LOOP_ENV | factory.consumes)]


def _model(cfg: Config) -> list[str]:
    try:
        factory = POLICIES.get(cfg.model.model_type)
    except ConfigError as error:
        return error.problems
    owner = f"model_type '{cfg.model.model_type}'"
    return [*factory.validate(cfg.model), *_ignored(cfg, "model", owner, _LOOP_MODEL | factory.consumes)]


def _algorithm(cfg: Config) -> list[str]:
    chosen = cfg.algorithm
    problems = algorithms.problems(chosen)
    try:
        consumed = algorithms.consumed_keys(chosen.adv_type, chosen.loss_type)
    except UnknownNameError:
        return problems  # which name it was is among them
    owner = f"adv_type '{chosen.adv_type}' with loss_type '{chosen.loss_type}'"
    return [*problems, *_ignored(cfg, "algorithm", owner, consumed)]


def _ignored(cfg: Config, group: str, owner: str, consumed: Iterable[str]) -> list[str]:
    """Keys of a group that differ from their default but have no reader."""
    read = frozenset(consumed)
    problems: list[str] = []
    for name, value in leaves(cfg):
        head, _, rest = name.partition(".")
        if head != group or rest in read or rest.split(".")[0] in read:
            continue
        default = all_keys()[name].default
        if value != default:
            problems.append(
                f"{name}={spell(value)}: {owner} does not read this key. Leave it at {spell(default)}; "
                f"it reads: {', '.join(sorted(read))}."
            )
    return problems
