"""Results of a run, read from the files of its folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from embodyrl.errors import ConfigError
from embodyrl.files import LONGEST_LINE, read_json, read_lines, read_tail
from embodyrl.monitor.intervals import Mean, Rate, Score

EVENTS_FILE = Path("logs") / "events.log"
EPISODES_FILE = "episodes.jsonl"
TABLE_FILE = "eval.json"
METRICS_FILE, METRICS_LOGGER = "metrics.jsonl", "jsonl"
COSTS_FILE = "costs.jsonl"
"""Name of the file with the wall-clock and CPU seconds of each attempt (process start) of a run."""
VIDEO_FOLDER = "videos"
"""Default name of a run's video folder; `video_cfg.base_dir` overrides the default."""


_HUGE_NUMBER = re.compile(rb"\d{40}|\d[eE]\+?\d{3}")
"""Pattern of numbers that, or whose sums, may not fit into a float."""
_MAX_RETURN = 1e100
"""Maximum absolute return of an episode; squares of larger numbers may not fit into a float."""
_NUM_UNLIKELY_TOKENS = 5
"""Number of tokens with the lowest probability that are shown for each episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """Result of one evaluation episode, a row of `episodes.jsonl`."""

    episode: int
    task_id: Annotated[int, Field(ge=0, lt=100_000)]
    task: str
    reset_id: int
    seed: int
    success_once: bool | None
    """True if the goal was reached at any step; None: the environment does not report success."""
    success_at_end: bool | None
    episode_return: Annotated[float, Field(validation_alias="return")]
    steps: Annotated[int, Field(ge=0, lt=1 << 53)]
    terminated: bool
    truncated: bool
    seconds: float
    video: str | None
    suite: str = ""
    """Suite of the task; empty if the evaluation covers a single suite."""
    state: int | None = None
    """Index of the initial state in its suite; None in files of earlier versions."""
    conversation: tuple[tuple[str, str], ...] = ()
    """(role, text) of every turn of a text task, including the last reply."""
    solved_at_reset: bool = False
    """True if the goal was already reached before the first action."""
    logprobs: tuple[Annotated[tuple[tuple[str, float], ...], Field(min_length=1)], ...] = ()
    """(text, log-probability) pairs of each reply token: first the sampled token, then the most probable tokens. Empty
    without `rollout.logprobs`."""

    @property
    def outcome(self) -> str:
        """`success` or `failure`; `played` if the environment does not report success."""
        success = self.success_once
        return "played" if success is None else "success" if success else "failure"

    @property
    def warnings(self) -> list[str]:
        """Lines of text about the least probable tokens of the replies and their most probable alternatives."""
        unlikely = sorted(range(len(self.logprobs)), key=lambda i: self.logprobs[i][0][1])[:_NUM_UNLIKELY_TOKENS]
        lines = []
        for i in sorted(unlikely):
            sampled, *alternatives = (f"{json.dumps(t, ensure_ascii=False)} {p:.2f}" for t, p in self.logprobs[i])
            lines.append(f"token {i + 1}: {sampled}; most probable {', '.join(alternatives)}")
        return lines

    def to_json(self) -> dict[str, object]:
        """Return the row as a JSON object."""
        return {("return" if f.name == "episode_return" else f.name): getattr(self, f.name) for f in fields(self)}


_EPISODE_ROW = TypeAdapter(EpisodeRow)


def compute_score(episodes: Sequence[EpisodeRow], *, known: bool = False) -> Score:
    """Return the success rate of episodes, or their mean return if the environment reports no success.

    `known` is True if other episodes of the environment report success; the result is then always a success rate.
    """
    if episodes and not known and all(e.success_once is None for e in episodes):
        return Mean.of((e.reset_id, e.episode_return) for e in episodes)
    return Rate.of((e.reset_id, bool(e.success_once)) for e in episodes)


def get_main_suite(episodes: Sequence[EpisodeRow]) -> str:
    """Return the main suite of an evaluation, which is the suite of the lowest task id."""
    return min(episodes, key=lambda e: e.task_id).suite if episodes else ""


def group_by_suite(rows: Sequence[EpisodeRow]) -> dict[str, list[EpisodeRow]]:
    """Return the episodes of each suite, the main suite first; without episodes, one empty group."""
    groups: dict[str, list[EpisodeRow]] = {get_main_suite(rows): []}
    for row in rows:
        groups.setdefault(row.suite, []).append(row)
    return groups


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file; empty if the file is missing. Truncated lines are skipped."""
    return [*_parse_rows(read_lines(path))] if path.is_file() else []


def count_missing_rows(rows: Iterable[Mapping[str, Any]], last_step: int, interval: int = 1) -> int:
    """Count the training steps up to `last_step` whose rows are missing; a row is due every `interval` steps."""
    steps = {row.get("step", 0) for row in rows}
    return last_step // interval - sum(0 < step <= last_step and step % interval == 0 for step in steps)


def _parse_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if _HUGE_NUMBER.search(line):
            continue
        try:
            row = from_json(line, allow_inf_nan=False, cache_strings="keys")  # five times as fast as json.loads
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step", 0), int):
            yield row


def read_newest_values(path: Path, names: Sequence[str]) -> list[Any]:
    """Return the last value of each metric in a JSON lines file, or None for a missing metric."""
    # Only the end of the file is read, because listing runs needs the last values of many files.
    lines = read_tail(path, LONGEST_LINE).splitlines()[::-1] if path.is_file() else []
    values = []
    for name in names:
        rows = _parse_rows(line for line in lines if f'"{name}"'.encode() in line)
        values.append(next((row[name] for row in rows if name in row), None))
    return values


def read_episodes(path: Path) -> list[EpisodeRow]:
    """Read the rows of an `episodes.jsonl`, sorted by episode number.

    Raises:
        ConfigError: a row lacks a field or has an invalid value.
    """
    rows = []
    for line in read_lines(path) if path.is_file() else ():
        try:
            row = _EPISODE_ROW.validate_json(line, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            if problem["type"] != "json_invalid":  # a killed process may have written only a part of a line
                field = ".".join(map(str, problem["loc"])) or "a row"
                raise ConfigError(f"{path} is damaged: {field}: {problem['msg']}. Move or delete the file.") from error
            continue
        if abs(row.episode_return) > _MAX_RETURN:
            raise ConfigError(f"{path} is damaged: a return is larger than {_MAX_RETURN:g}. Move or delete the file.")
        rows.append(row)
    return sorted(rows, key=lambda row: row.episode)


def read_table(folder: Path) -> dict[str, Any]:
    """Read the `eval.json` in the folder of an evaluation; return an empty dict if the file is missing.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / TABLE_FILE
    if not path.is_file():
        return {}
    try:
        table = {"wall_s": 0.0, "env_steps": 0, "dropped": 0} | read_json(path)
        is_valid = all(0 <= table[name] < 1 << 53 for name in ("wall_s", "env_steps", "dropped"))
        protocol = table.get("protocol") or {}
        is_valid = is_valid and isinstance(protocol, dict) and isinstance(protocol.get("departures"), list | None)
    except (OSError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{path} is damaged: it is not a table of results. Move or delete the file.")
    return table


def check_results(folder: Path, rows: Sequence[EpisodeRow]) -> None:
    """Compare the episodes of a finished evaluation with the results per task and overall in its `eval.json`.

    Raises:
        ConfigError: an episode occurs twice, a return is not finite, or episodes are missing or were changed.
    """
    if len({row.episode for row in rows}) < len(rows):
        problem = "an episode occurs twice"
    elif not all(math.isfinite(row.episode_return) for row in rows):
        problem = "a return is not finite"
    elif not _matches(read_table(folder), rows):
        problem = f"count, returns or successes differ from {TABLE_FILE}"
    else:
        return
    raise ConfigError(f"{folder / EPISODES_FILE}: {problem}. Repeat the evaluation, or delete the folder.")


def group_by_task(rows: Sequence[EpisodeRow]) -> dict[int, list[EpisodeRow]]:
    """Return the episodes of each task by task id, in the order of the ids, and of the whole main suite with key -1."""
    groups: dict[int, list[EpisodeRow]] = {task: [] for task in sorted({row.task_id for row in rows})}
    for row in rows:
        groups[row.task_id].append(row)
    return groups | {-1: next(iter(group_by_suite(rows).values()))}


def _matches(table: Mapping[str, Any], rows: Sequence[EpisodeRow]) -> bool:
    if "tasks" not in table:  # another version
        return True
    groups = group_by_task(rows)
    try:
        results = {result["task_id"]: result for result in (*table["tasks"], table["overall"])}
        if results.keys() != groups.keys():
            return False
        for task, group in groups.items():
            count = results[task]["episodes"]
            stored = [count, *(count * float(results[task][name] or 0) for name in ("mean_return", "success_once"))]
            successes = sum(row.success_once is True for row in group)
            found = [len(group), math.fsum(row.episode_return for row in group), successes]
            if not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in zip(found, stored, strict=True)):
                return False
    except (KeyError, OverflowError, TypeError, ValueError):
        return False
    return True
