"""Result cards of runs, as JSON and Markdown: command, machine, seeds, results and costs."""

from __future__ import annotations

import hashlib
import html
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodyrl.config.trust import TRUST, path_prefix
from embodyrl.errors import replace_control_characters
from embodyrl.files import json_text, write_atomically
from embodyrl.monitor.history import COSTS_FILE, read_rows
from embodyrl.monitor.intervals import Rate, Score
from embodyrl.monitor.phases import run_seconds
from embodyrl.reports.history import Evaluation, History, is_within, read_history
from embodyrl.reports.paired import PairedComparison, compare_suites
from embodyrl.version import __version__

CARD_JSON, CARD_TEXT = "card.json", "CARD.md"
_ENV_KEYS = ("env_type", "task_suite_name", "id", "axis", "render_profile", "texture_colorspace")


def write_card(folder: Path, out: Path | None = None) -> list[Path]:
    """Write `card.json` and `CARD.md` of a run into the run folder, or into `out`; return both paths.

    Raises:
        ConfigError: the folder is not a run.
    """
    card, target = build_card(folder), out or folder
    paths = [target / CARD_JSON, target / CARD_TEXT]
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(paths[0], json_text(card))
    write_atomically(paths[1], format_card(card))
    return paths


def build_card(folder: Path) -> dict[str, Any]:
    """Return the result card of a run: command, machine, states and seeds, results with intervals, costs.

    Raises:
        ConfigError: the folder is not a run.
    """
    history = read_history(folder)
    values, machine = history.values, _read_machine(history)
    first, last = (history.evaluations[0], history.evaluations[-1]) if history.evaluations else (None, None)
    comparisons = compare_suites(first.episodes, last.episodes) if first and last and first is not last else []
    environment = {key.removesuffix("_name"): values.get(f"env.{key}") for key in _ENV_KEYS}
    weights = values.get("ckpt") or values.get("model.path")
    return {
        "card": 1,
        "run": history.name,
        "embodyrl": machine.pop("embodyrl", __version__),
        "commit": machine.pop("commit", None),
        "config_sha256": hashlib.sha256(history.text("config.yaml").encode()).hexdigest(),
        "sources": {
            name: digest
            for name, _, digest in (item.partition(" ") for item in machine.pop("source", "").split(", ") if item)
        },
        "command": _format_commands(history, path_prefix(machine.pop("pythonpath", "").split(os.pathsep))),
        "environment": {key: value for key, value in environment.items() if value is not None},
        "model": {"type": values.get("model.model_type"), "weights": None if weights is None else str(weights)},
        "algorithm": values.get("algorithm.adv_type") if history.rows else None,
        "seeds": _get_seeds(values, last),
        "states": _get_states(values, last),
        "protocol": last.table.get("protocol") if last else None,
        "figures": [
            _build_results(evaluation) for evaluation in dict.fromkeys((first, last)) if evaluation is not None
        ],
        "change": [_describe_change(item) for item in comparisons],
        "solved_at_reset": sum(e.solved_at_reset for e in last.episodes) if last else 0,
        "dropped_episodes": sum(int(e.table["dropped"]) for e in history.evaluations),
        "missing_rows": history.num_missing_rows,
        "costs": _sum_costs(history),
        "machine": machine,
    }


def format_card(card: Mapping[str, Any]) -> str:
    """Return a result card as Markdown. Markup in texts of the run, which may be untrusted, is escaped."""
    weights, environment = card["model"]["weights"] or "random", card["environment"]
    lines = [f"# Result card: {escape_markdown(card['run'])}", "", "| | |", "|---|---|"]
    fields = {
        "environment": ", ".join(f"{name} {value}" for name, value in environment.items() if value is not None),
        "policy": f"{card['model']['type']}, weights {weights}",
        "algorithm": card["algorithm"],
        "command": card["command"],
        "protocol": format_protocol(card["protocol"]) if card["protocol"] else None,
        "states": "; ".join(f"{name} {value}" for name, value in card["states"].items()),
        "seeds": "; ".join(f"{name} {value}" for name, value in card["seeds"].items()),
        "costs": "; ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in card["costs"].items() if value),
        "code": f"embodyrl {card['embodyrl']}, commit {card['commit'] or 'not known'}",
        "config": f"sha256 {card['config_sha256'][:16]}",
        "own code": "; ".join(f"{name}, sha256 {digest}" for name, digest in card.get("sources", {}).items()),
        "machine": "; ".join(f"{name} {value}" for name, value in card["machine"].items()),
        "solved at reset": f"{n} episodes" if (n := card.get("solved_at_reset")) else None,
        "incomplete": f"rows of {n} training steps are missing in metrics.jsonl; costs exclude these steps"
        if (n := card.get("missing_rows"))
        else None,
        "lost": f"{card['dropped_episodes']} episodes were dropped" if card["dropped_episodes"] else None,
    }
    lines += [
        f"| {name} | {(_code if name == 'command' else escape_markdown)(str(v))} |" for name, v in fields.items() if v
    ]
    for results in card["figures"]:
        lines += ["", f"## Step {results['step']}", "", "| | 95 % interval | episodes | states |", "|---|---|---|---|"]
        cells = [(escape_markdown(row["name"]), row["text"], row["episodes"], row["states"]) for row in results["rows"]]
        lines += [f"| {name} | {text} | {episodes} | {states} |" for name, text, episodes, states in cells]
    if card["change"]:
        lines += ["", "## First against last", ""]
        lines += [
            f"- {escape_markdown(row['suite']) + ': ' if row['suite'] else ''}{row['text']}" for row in card["change"]
        ]
    return "\n".join(lines) + "\n"


def escape_markdown(text: str) -> str:
    """Return a text in one line of Markdown, without HTML, links, code, cells, emphasis or control characters.

    The line contains no mathematics and, also at the start of a block, no heading, list, quotation or definition.
    """
    line = html.escape(" ".join(replace_control_characters(text).split()), quote=False)
    escaped = re.sub(r"[\\`|*~]|(?<![^\W_])_|_(?![^\W_])|\](?=\()", r"\\\g<0>", line)
    # Many pages show addresses as links even without markup.
    pattern = r"(?i):(?=//)|(?<=www)\.|[@$]|^[-#+\[]|^\d+[.)]"
    return re.sub(pattern, lambda match: f"{match[0][:-1]}&#{ord(match[0][-1])};", escaped)


def _code(text: str) -> str:
    """Return a text as code in a Markdown table, without control characters."""
    text = replace_control_characters(text).replace("\n", "?")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}".replace("|", "\\|")


def _read_machine(history: History) -> dict[str, str]:
    """Return the values of env.txt by name; values with the same name are joined."""
    values: dict[str, list[str]] = {}
    for line in history.text("env.txt").splitlines():
        name, _, value = line.partition(" ")
        values.setdefault(name, []).append(value)
    joined = {name: ", ".join(parts) for name, parts in values.items()}
    return {name: value for name, value in joined.items() if value not in ("not installed", "not known")}


def _format_commands(history: History, prefix: str) -> str:
    """Return the shell command that started the run, and later commands with other arguments, each after `prefix`.

    Arguments are quoted again, because the file of an untrusted run may contain further shell commands.
    """
    first, *later = [_parse(line.partition(": ")[2]) for line in history.text("overrides.txt").splitlines()] or [()]
    commands = [["embodyrl", *first]]
    for arguments in dict.fromkeys(later):
        extra = [argument for argument in arguments[1:] if argument != TRUST]
        if extra and extra != [*first[1:]]:
            commands.append(["embodyrl", *first[:1], "--resume", history.name, *extra])
    return " && ".join(prefix + shlex.join(command) for command in commands)


def _parse(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError:  # an open quote
        return (command,)


def _get_seeds(values: Mapping[str, Any], last: Evaluation | None) -> dict[str, Any]:
    seeds = sorted({e.seed for e in last.episodes}) if last else []
    ranges = {"evaluation": f"{seeds[0]} to {seeds[-1]}"} if seeds else {}
    return {"run": values.get("seed"), **ranges}


def _get_states(values: Mapping[str, Any], last: Evaluation | None) -> dict[str, Any]:
    """Return the state ids of both splits, and the number of distinct states in the last evaluation."""
    states: dict[str, Any] = {}
    for name, split in (("training", "train"), ("evaluation", "eval")):
        if any(key.startswith(f"env.{split}.") for key in values):
            states[name] = values.get(f"env.{split}.state_ids") or "all"
    if last:
        states["evaluated"] = len({e.reset_id for e in last.episodes})
    return states


def _build_row(name: str, score: Score) -> dict[str, Any]:
    low, high = score.interval
    kind = "success" if isinstance(score, Rate) else "return"
    row = {"name": name, "kind": kind, "value": score.value, "low": low, "high": high, "episodes": score.episodes}
    return row | {"states": score.states, "text": str(score)}


def _build_results(evaluation: Evaluation) -> dict[str, Any]:
    rows = [_build_row("all tasks", evaluation.score())]
    rows += [_build_row(f"suite {suite}", score) for suite, score in evaluation.suites.items()]
    tasks = evaluation.tasks if len(evaluation.tasks) > 1 else ()
    rows += [_build_row(task, evaluation.score(task)) for task in tasks]
    return {"step": evaluation.step, "rows": rows}


def _describe_change(comparison: PairedComparison) -> dict[str, Any]:
    counts = {"pairs": comparison.pairs, "only_first": comparison.only_first, "only_last": comparison.only_second}
    return {
        "suite": comparison.suite,
        **counts,
        "p": comparison.p_value,
        "text": comparison.sentence(("first", "last")),
    }


def _sum_costs(history: History) -> dict[str, float]:
    """Return the costs of a run: env steps, hours, and the peak memory of a process.

    The duration is the total of the finished attempts or the total of the metrics, whichever is larger.
    """
    types = {"wall_s": int | float, "cpu_s": int | float, "gpus": int}
    path = history.folder / COSTS_FILE
    rows = read_rows(path) if is_within(path, history.folder) else []
    attempts = [row for row in rows if all(isinstance(row.get(name), kind) for name, kind in types.items())]
    steps = sum(row.get("env/steps") or 0.0 for row in history.rows)
    attempts_s, metrics_s = sum(row["wall_s"] for row in attempts), run_seconds(history.rows)
    wall_s = max(attempts_s, metrics_s) or sum(e.table["wall_s"] for e in history.evaluations)
    costs = {
        "training_env_steps": int(steps),
        # The table of a resumed evaluation counts the steps of its last attempt only.
        "evaluation_env_steps": sum(
            max(int(evaluation.table["env_steps"]), sum(e.steps for e in evaluation.episodes))
            for evaluation in history.evaluations
        ),
        "wall_hours": round(wall_s / 3600, 3),
    }
    if attempts and attempts_s >= metrics_s:  # else an attempt was killed before its costs were written
        costs["cpu_hours"] = round(sum(row["cpu_s"] for row in attempts) / 3600, 3)
        costs["gpu_hours"] = round(sum(row["wall_s"] * row["gpus"] for row in attempts) / 3600, 3)
    if peaks := [row["peak_mib"] for row in rows if isinstance(row.get("peak_mib"), int)]:
        costs["largest_process_mib"] = max(peaks)
    return costs


def format_protocol(protocol: Mapping[str, Any]) -> str:
    """Return the name of an evaluation protocol, and the settings that differ from the protocol, as text."""
    differences = "; ".join(map(str, protocol.get("departures") or ()))
    return f"{protocol.get('name')}, {f'differs: {differences}' if differences else 'followed'}"
