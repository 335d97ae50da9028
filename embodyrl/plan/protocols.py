"""Published evaluation protocols: the settings of `eval=<protocol>`, and deviations from them."""

from __future__ import annotations

from typing import Any

from embodyrl.config.compose import parse_override
from embodyrl.config.settings import format_value, to_builtin
from embodyrl.plan.schema import Config
from embodyrl.types import EnvSpec


def protocol_problems(cfg: Config, env: EnvSpec) -> list[str]:
    """Return an error if the protocol does not list the environment."""
    if not cfg.evaluates or not (protocol := cfg.eval.protocol).horizons or protocol.settled:
        return []
    known = ", ".join(protocol.horizons)
    return [f"eval.protocol.name={protocol.name} does not cover env '{env.name}'. Choose one of its envs: {known}."]


def departures(cfg: Config, env: EnvSpec) -> list[str]:
    """Return the differences between an evaluation and its protocol, one line each.

    Documented deviations of embodyrl from the protocol come last.
    """
    values = dict(cfg.leaves())
    found = [
        f"{key}={format_value(values[key])} instead of {format_value(value)}"
        for key, value in _asked(cfg, env).items()
        if key in values and to_builtin(values[key]) != value
    ]
    return [*found, *cfg.eval.protocol.departures]


def protocol_record(cfg: Config, env: EnvSpec) -> dict[str, Any] | None:
    """Return the protocol's entry in result files; None: no protocol is set."""
    protocol = cfg.eval.protocol
    if protocol.name is None:
        return None
    found = departures(cfg, env)
    return {"name": protocol.name, "followed": not found, "departures": found, "sources": list(protocol.sources)}


def _asked(cfg: Config, env: EnvSpec) -> dict[str, Any]:
    """Return {key: value} of the settings that the protocol requires."""
    asked = {
        "eval.episodes": None,
        "eval.samples": 1,
        **dict(parse_override(word) for word in cfg.eval.protocol.settings),
    }
    if (horizon := cfg.eval.protocol.horizon(env.name)) is not None:
        asked["env.eval.max_episode_steps"] = horizon
    return asked
