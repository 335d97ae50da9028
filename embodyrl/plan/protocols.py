"""Published evaluation protocols: the settings of `eval=<protocol>`, and deviations from them."""

from __future__ import annotations

from typing import Any

from embodyrl.config.compose import parse_override
from embodyrl.config.settings import format_value, to_builtin
from embodyrl.plan.schema import Config
from embodyrl.types import EnvSpec


def protocol_problems(cfg: Config, env: EnvSpec) -> list[str]:
    """Return an error if the protocol does not list the environment."""
    if not cfg.has_evaluations or not (protocol := cfg.eval.protocol).horizons or protocol.settled:
        return []
    env_names = ", ".join(protocol.horizons)
    return [f"eval.protocol.name={protocol.name} does not cover env '{env.name}'. Choose one of its envs: {env_names}."]


def protocol_deviations(cfg: Config, env: EnvSpec) -> list[str]:
    """Return the differences between an evaluation and its protocol, one line each.

    Documented deviations of embodyrl from the protocol come last.
    """
    values = dict(cfg.leaves())
    differences = [
        f"{key}={format_value(values[key])} instead of {format_value(value)}"
        for key, value in _get_required_settings(cfg, env).items()
        if key in values and to_builtin(values[key]) != value
    ]
    return [*differences, *cfg.eval.protocol.departures]


def build_protocol_record(cfg: Config, env: EnvSpec) -> dict[str, Any] | None:
    """Return the protocol's entry in result files; None: no protocol is set."""
    protocol = cfg.eval.protocol
    if protocol.name is None:
        return None
    differences = protocol_deviations(cfg, env)
    return {
        "name": protocol.name,
        "followed": not differences,
        "departures": differences,
        "sources": list(protocol.sources),
    }


def _get_required_settings(cfg: Config, env: EnvSpec) -> dict[str, Any]:
    """Return {key: value} of the settings that the protocol requires."""
    required = {
        "eval.episodes": None,
        "eval.samples": 1,
        **dict(parse_override(override) for override in cfg.eval.protocol.settings),
    }
    if (horizon := cfg.eval.protocol.horizon(env.name)) is not None:
        required["env.eval.max_episode_steps"] = horizon
    return required
