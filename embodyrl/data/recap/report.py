"""The report of a RECAP run: one row per round, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.files import json_text, write_atomically
from embodyrl.monitor.history import read_table

REPORT_JSON, REPORT_TEXT = "recap.json", "recap.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Results of one round; round 0 is the initial policy."""

    number: int
    run: str
    """Folder of the SFT run; for round 0, path of the initial weights."""
    data: str | None = None
    """Folder of the collected episodes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the value models and labels (`labelling.label`)."""
    success: float | None = None
    """Success rate on the evaluation states, with its 95 % interval `low` to `high`; None without an evaluation."""
    low: float | None = None
    high: float | None = None
    episodes: int = 0


def read_score(run: Path) -> dict[str, Any] | None:
    """Return success rate, interval and episodes of the newest finished evaluation; None without evaluation."""
    for folder in sorted((run / "eval").glob("step_*"), reverse=True):
        if table := read_table(folder):
            overall = table["overall"]
            return {
                "success": overall["success_once"],
                "low": overall["low"],
                "high": overall["high"],
                "episodes": overall["episodes"],
            }
    return None


def write_report(folder: Path, rounds: Sequence[Round], commands: Sequence[str]) -> list[str]:
    """Write the report as JSON and as Markdown; return the lines of the table."""
    head = ["round", "success", "95 % interval", "pool", "solved", "positive", "V error", "V rank corr."]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(_format_cells(result))} |" for result in rounds]
    command_lines = ["", "Commands of the stages:", "", *(f"    {command}" for command in commands)]
    write_atomically(folder / REPORT_TEXT, "\n".join(["# RECAP", "", *lines, *command_lines]) + "\n")
    content = {"rounds": [asdict(result) for result in rounds], "commands": list(commands)}
    write_atomically(folder / REPORT_JSON, json_text(content))
    return lines


def _format_cells(result: Round) -> list[str]:
    values = result.values
    success_text = "" if result.success is None else f"{result.success:.3f} ({result.episodes})"
    bounds = "" if result.low is None or result.high is None else f"{result.low:.3f} to {result.high:.3f}"
    if not values:
        return [str(result.number), success_text, bounds, "", "", "", "", ""]
    pool = f"{values['episodes']:.0f} episodes"
    solved = f"{values['successes'] / values['episodes']:.2f}"
    numbers = (f"{values[name]:.3f}" for name in ("positive", "value_error", "value_rank_correlation"))
    return [str(result.number), success_text, bounds, pool, solved, *numbers]
