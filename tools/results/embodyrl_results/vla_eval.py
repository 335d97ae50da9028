"""Export of evaluations as result files of vla-eval 0.8 (layout: src/vla_eval/results/collector.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embodyrl.errors import ConfigError
from embodyrl.monitor.history import EpisodeRow
from embodyrl.reports.history import History, read_history
from embodyrl.version import __version__

Episode = dict[str, Any]


def vla_eval_result(runs: Sequence[Path]) -> dict[str, Any]:
    """Combine the newest evaluations of runs into one result in the layout of vla-eval.

    Raises:
        ConfigError: a run has no evaluation with known success, two runs evaluate different policies or environments,
            or contain the same episode.
    """
    facts: dict[str, Any] = {}
    tasks: defaultdict[str, list[Episode]] = defaultdict(list)
    seen: dict[tuple[int, int, int], int] = {}
    for number, run in enumerate(runs):
        history = read_history(run)
        found = _facts(history)
        facts = facts or found
        if different := [name for name in facts if facts[name] != found[name]]:
            raise ConfigError(f"{run}: {', '.join(different)} differ from {runs[0]}. Export these runs separately.")
        if not history.evaluations:
            raise ConfigError(f"{run} contains no finished evaluation. Run `embodyrl eval {run}` first.")
        for row in history.evaluations[-1].episodes:
            key = (row.task_id, row.reset_id, row.seed)
            if (other := seen.setdefault(key, number)) != number:
                raise ConfigError(
                    f"{run} and {runs[other]} contain the same episode (task '{row.task}'). Omit one of these runs."
                )
            tasks[row.task].append(_episode(row, run, len(tasks[row.task])))
    listed = [{"task": task, "episodes": episodes} | _totals(episodes) for task, episodes in tasks.items()]
    return {
        "benchmark": facts.pop("environment"),
        "mode": "sync",
        "harness_version": f"embodyrl {__version__}",
        "created_at": datetime.now(UTC).isoformat(),
        "tasks": listed,
        "config": {"params": facts},
        "num_errors": 0,
        "metric_keys": {"success": "mean"},
        "mean_success": _mean_success([one for episodes in tasks.values() for one in episodes]),
    }


def _facts(history: History) -> dict[str, Any]:
    env, model = (_section(history, name) for name in ("env", "model"))
    return {
        "environment": str(env.get("task_suite_name") or env.get("id") or env.get("env_type")),
        "model": str(model.get("model_type")),
        "weights": str(history.config.get("ckpt") or model.get("path") or history.name),
    }


def _section(history: History, name: str) -> Mapping[str, Any]:
    found = history.config.get(name)
    return found if isinstance(found, Mapping) else {}


def _episode(row: EpisodeRow, run: Path, number: int) -> Episode:
    if row.success_once is None:
        raise ConfigError(f"{run}: the environment does not report success. Set env.success_key, and evaluate again.")
    return {
        "episode_id": number,
        "metrics": {"success": row.success_once},
        "steps": row.steps,
        "elapsed_sec": row.seconds,
    }


def _totals(episodes: Sequence[Episode]) -> dict[str, Any]:
    steps = sum(one["steps"] for one in episodes)
    return {
        "num_episodes": len(episodes),
        "avg_steps": steps / len(episodes),
        "mean_success": _mean_success(episodes),
    }


def _mean_success(episodes: Sequence[Episode]) -> float:
    return round(sum(one["metrics"]["success"] for one in episodes) / (len(episodes) or 1), 4)
