"""Result cards from result files of other tools: vla-eval 0.8 and lerobot-eval (eval_info.json of 0.3 and later).

File formats: allenai/vla-evaluation-harness, src/vla_eval/results/collector.py; huggingface/lerobot,
src/lerobot/scripts/lerobot_eval.py, `eval_policy_all`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodyrl.errors import ConfigError
from embodyrl.files import read_json
from embodyrl.monitor.intervals import Rate
from embodyrl_results.table import Card

SuccessFlags = dict[str, list[bool]]
"""Success flags of the episodes, by task name."""


def import_result(path: Path, protocol: str | None) -> Card:
    """Convert a result file of vla-eval or lerobot-eval to a result card.

    Args:
        path: the JSON file.
        protocol: name of the evaluation protocol; None: from the file.

    Raises:
        ConfigError: the file has another format, contains no episodes, or names no protocol.
    """
    try:
        raw = read_json(path)
        if isinstance(raw, dict) and "harness_version" in raw:
            source, outcomes, dropped = _parse_vla_eval(raw)
            protocol = protocol or _get_vla_eval_protocol(raw)
        elif isinstance(raw, dict) and ("per_task" in raw or "per_episode" in raw):
            source, dropped = "lerobot-eval", 0
            outcomes = _parse_lerobot(raw)
        else:
            raise ValueError("the file is in neither the format of vla-eval nor of lerobot-eval")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Pass a result file.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path} cannot be imported: {reason}. Pass a result file of vla-eval or lerobot-eval."
        ) from error
    if not any(outcomes.values()):
        raise ConfigError(f"{path} contains no episode with an outcome. Pass a finished evaluation.")
    if not protocol:
        raise ConfigError(
            f"{path}: {source} files contain no evaluation protocol. Add --protocol 'benchmark, version, episodes'."
        )
    rates = {task: Rate(sum(successes), len(successes)) for task, successes in outcomes.items() if successes}
    overall = Rate(sum(rate.successes for rate in rates.values()), sum(rate.episodes for rate in rates.values()))
    rows = [
        _build_row("all tasks", overall),
        *(_build_row(task, rate) for task, rate in rates.items() if len(rates) > 1),
    ]
    return {
        "card": 1,
        "imported": source,
        "protocol": {"name": protocol, "departures": []},
        "figures": [{"step": None, "rows": rows}],
        "dropped_episodes": dropped,
    }


def _build_row(name: str, rate: Rate) -> dict[str, Any]:
    low, high = rate.interval
    values = {"value": rate.value, "low": low, "high": high, "episodes": rate.episodes, "states": None}
    return {"name": name, "kind": "success", **values, "text": str(rate)}


def _to_bool(value: object) -> bool:
    """Convert a success flag to bool; some tools store 0.0 or 1.0."""
    if value not in (0, 1):
        raise ValueError(f"success must be true or false, but is {value!r}")
    return bool(value)


def _parse_vla_eval(raw: Mapping[str, Any]) -> tuple[str, SuccessFlags, int]:
    """Return the source, the success flags by task, and the number of excluded episodes of a vla-eval file.

    Episodes with an infrastructure error are excluded.
    """
    outcomes: SuccessFlags = defaultdict(list)
    dropped = 0
    for task in raw["tasks"]:
        episodes = task["episodes"]
        finished = [episode for episode in episodes if not episode.get("failure_reason")]
        dropped += len(episodes) - len(finished)
        outcomes[str(task["task"])] += [_to_bool(episode["metrics"]["success"]) for episode in finished]
    return f"vla-eval {raw['harness_version']}", outcomes, dropped


def _get_vla_eval_protocol(raw: Mapping[str, Any]) -> str:
    parts = [str(raw["benchmark"]), f"{raw['mode']} mode"]
    settings = (raw.get("config") or {}).get("params") or {}
    parts += [f"{key} {value}" for key, value in sorted(settings.items()) if isinstance(value, str | int | float)]
    return ", ".join(parts)


def _parse_lerobot(raw: Mapping[str, Any]) -> SuccessFlags:
    """Return the success flags by task of an eval_info.json; that of lerobot-eval 0.3 has one task."""
    if "per_task" not in raw:
        return {"all": [_to_bool(episode["success"]) for episode in raw["per_episode"]]}
    outcomes: SuccessFlags = defaultdict(list)
    for task in raw["per_task"]:
        outcomes[f"{task['task_group']} {task['task_id']}"] += map(_to_bool, task["metrics"]["successes"])
    return outcomes
