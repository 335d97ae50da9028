"""Metrics, evaluations and videos of a run, read from the files of its folder."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from embodyrl.checkpoint.store import CheckpointStore, parse_step
from embodyrl.config.compose import flatten
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import format_value, is_key_or_subkey
from embodyrl.errors import ConfigError
from embodyrl.files import inside, natural_sort_key, read_tail
from embodyrl.monitor.history import (
    EPISODES_FILE,
    METRICS_FILE,
    METRICS_LOGGER,
    TABLE_FILE,
    VIDEO_FOLDER,
    EpisodeRow,
    check_results,
    compute_score,
    count_missing_rows,
    group_by_suite,
    read_episodes,
    read_rows,
    read_table,
)
from embodyrl.monitor.intervals import Score
from embodyrl.reports.samples import Sample, pick_samples

SUCCESS_KEYS = ("env.eval.max_episode_steps", "env.success_key")
"""Keys that determine the success of an episode, given its initial state and the actions."""
LONGEST_TEXT = 1 << 24
"""Maximum number of bytes that are read from the end of a text file of a run."""
_SUCCESS_METRICS = {"train/success_once", "eval/success_once"}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of one evaluation."""

    step: int
    episodes: tuple[EpisodeRow, ...]
    table: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Content of `eval.json`; empty for an unfinished evaluation."""

    # Computed once: an untrusted run may contain thousands of tasks or suites.
    @cached_property
    def main_episodes(self) -> tuple[EpisodeRow, ...]:
        """Episodes of the main suite; all episodes if only one suite was evaluated."""
        return tuple(next(iter(group_by_suite(self.episodes).values())))

    @cached_property
    def tasks(self) -> dict[str, list[EpisodeRow]]:
        """Episodes of each task of the main suite, by the text of the task."""
        groups: dict[str, list[EpisodeRow]] = {}
        for episode in self.main_episodes:
            groups.setdefault(episode.task, []).append(episode)
        return groups

    @cached_property
    def suites(self) -> dict[str, Score]:
        """Score of each suite, the main suite first; empty if only one suite was evaluated."""
        scores = {name: compute_score(episodes) for name, episodes in group_by_suite(self.episodes).items()}
        return scores if len(scores) > 1 else {}

    def score(self, task: str | None = None, *, known: bool = False) -> Score:
        """Return the success rate (mean return if success is unknown) of one task, or all tasks of the main suite."""
        return compute_score(self.main_episodes if task is None else self.tasks.get(task, []), known=known)


@dataclass(frozen=True, kw_only=True)
class History:
    """Metrics, evaluations and config of a run, read from the run folder."""

    folder: Path
    config: Mapping[str, Any]
    rows: tuple[dict[str, float | None], ...]
    """Rows of metrics.jsonl, by metric name."""
    evaluations: tuple[Evaluation, ...]
    """Finished evaluations, in the order of their steps."""
    unfinished: Evaluation | None = None
    """Newest evaluation, if it is running or was interrupted; else None.
    An unfinished evaluation is not in `evaluations`, because its success rate is biased: the shortest episodes end
    first, and they are often successful."""
    suffix: str = ""
    """End of the name, which distinguishes runs in folders with equal names."""

    @property
    def name(self) -> str:
        """Name of the run folder, and the suffix."""
        return self.folder.name + self.suffix

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values of the config by dotted key."""
        return flatten(self.config)

    @property
    def num_missing_rows(self) -> int:
        """Number of training steps of an RL run whose rows of metrics are missing, for example after a power cut."""
        is_rl = "env" in self.config and "checkpoint" in self.config and "dagger" not in self.config
        if not is_rl or METRICS_LOGGER not in str(self.values.get("runner.logger.backends")):
            return 0
        saved_steps = CheckpointStore(self.folder / "checkpoints").steps()
        return count_missing_rows(self.rows, max([0, *saved_steps, *(int(row["step"] or 0) for row in self.rows)]))

    def text(self, name: str | Path) -> str:
        """Return the end of a text file of the run; empty if the file is missing or a link to another folder."""
        path = self.folder / name
        return read_tail(path, LONGEST_TEXT).decode("utf-8", "replace") if is_within(path, self.folder) else ""

    def has(self, name: str) -> bool:
        """Return True if a metric has a finite value in any row."""
        return any(row.get(name) is not None for row in self.rows)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the finite values of one metric as pairs (step, value)."""
        return [(int(row["step"] or 0), float(row[name] or 0)) for row in self.rows if row.get(name) is not None]

    def find_video(self, stored: str) -> Path | None:
        """Return the path of a video, even if the run folder and its video folder were moved; None if missing.

        The run's files are untrusted: only MP4 files in a folder with the run's name are accepted, without links.
        """
        saved, name = self.values.get("video_cfg.base_dir"), Path(stored).name
        base = Path(saved) if isinstance(saved, str) and saved else Path(VIDEO_FOLDER)
        base = Path(os.path.realpath(base)) if base.is_absolute() else base
        run, *parents = (Path(os.path.realpath(folder)) for folder in (self.folder, Path(), *self.folder.parents))
        candidates = (run / VIDEO_FOLDER / name, *(parent / base / self.folder.name / name for parent in parents))
        paths = (Path(os.path.normpath(path)) for path in candidates)
        return next((path for path in paths if path.suffix == ".mp4" and _is_video(path)), None)


def is_within(path: Path, folder: Path) -> bool:
    """Return True if a file is inside a folder after links are resolved."""
    # The run folder is untrusted: a link must not expose other files of this machine.
    try:
        return inside(folder, path.relative_to(folder)).is_file()
    except (OSError, ValueError):
        return False


def _is_video(path: Path) -> bool:
    if not path.is_file() or path != Path(os.path.realpath(path)):
        return False
    with path.open("rb") as file:
        return file.read(12)[4:8] == b"ftyp"


_NUMBERS = {int, float, NoneType}
_COUNTS = ("/episodes", "/effective_episodes")


def _is_valid(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a step and only numbers, rates of at most 1, and 0 or at least 1 episodes."""
    return (
        "step" in row
        and {*map(type, row.values())} <= _NUMBERS
        and all(
            0 <= value <= 1 + 1e-6 if name.endswith("/success_once") else value == 0 or value >= 1
            for name, value in row.items()
            if value is not None and name.endswith(("/success_once", *_COUNTS))
        )
    )


def read_history(folder: Path) -> History:
    """Read the metrics, evaluations and config of a run from the run folder.

    Raises:
        ConfigError: the folder is not a run.
    """
    file = folder / "config.yaml"
    if not is_within(file, folder):
        raise ConfigError(
            f"{folder}: config.yaml is missing, so the folder is not a run. `embodyrl list runs` lists the runs."
        )
    evaluations, unfinished = [], None
    files = (file for file in folder.glob(f"eval/step_*/{EPISODES_FILE}") if is_within(file, folder))
    for path in sorted(files, key=natural_sort_key):
        step, table = parse_step(path.parent.name), {}
        if step is None:
            continue
        if is_within(path.parent / TABLE_FILE, folder):
            table = read_table(path.parent)
        evaluation = Evaluation(step=step, episodes=tuple(read_episodes(path)), table=table)
        if table:  # the table is the last file of an evaluation
            check_results(path.parent, evaluation.episodes)
            evaluations.append(evaluation)
        else:
            unfinished = evaluation
    metrics = read_rows(folder / METRICS_FILE) if is_within(folder / METRICS_FILE, folder) else []
    rows = [row for row in metrics if _is_valid(row)]
    episodes = [e for evaluation in (*evaluations, unfinished) if evaluation is not None for e in evaluation.episodes]
    if any(e.success_once is not None for e in episodes) or any(_SUCCESS_METRICS & {*row} for row in rows):
        # Some environments report success only when it occurs: a missing value means no success.
        evaluations = [_fill_missing_success(evaluation) for evaluation in evaluations]
        unfinished = unfinished and _fill_missing_success(unfinished)
        for row in rows:
            row |= {name: 0.0 for name in _SUCCESS_METRICS - {*row} if f"{name.partition('/')[0]}/return" in row}
    return History(
        folder=folder,
        config=read_plain_yaml(file),
        rows=tuple(rows),
        evaluations=tuple(evaluations),
        unfinished=unfinished,
    )


def _fill_missing_success(evaluation: Evaluation) -> Evaluation:
    failed = {"success_once": False, "success_at_end": False}
    episodes = (replace(e, **failed) if e.success_once is None else e for e in evaluation.episodes)
    return replace(evaluation, episodes=tuple(episodes))


def select_samples(history: History, count: int) -> list[Sample]:
    """Select example conversations of the newest evaluation, each with its counterpart in the first evaluation."""
    if not history.evaluations:
        return []
    first, last = history.evaluations[0], history.evaluations[-1]
    return pick_samples(first.episodes if first is not last else (), last.episodes, count)


def is_running(run: Path) -> bool:
    """Return True if a run is active: the process in its lock file exists.

    A killed process does not remove the lock file.
    """
    lock = run / "lock"
    text = read_tail(lock, 4096).decode("utf-8", "replace") if lock.is_file() else ""
    match = re.match(r"process (\d+) on (.*)", text)
    return match is not None and (match[2] != socket.gethostname() or Path(f"/proc/{match[1]}").exists())


def describe_differences(first: Mapping[str, Any], second: Mapping[str, Any], keys: Collection[str]) -> str | None:
    """Return the differences of two configs in the given keys, as text; None: no difference.

    All subkeys of `keys` are also compared.
    """
    first_values, second_values = flatten(first), flatten(second)
    # Only common keys are compared, because configs of earlier versions have fewer keys.
    differences = [
        f"{key}={format_value(first_values[key])} and {format_value(second_values[key])}"
        for key in sorted(first_values.keys() & second_values.keys())
        if is_key_or_subkey(key, keys) and first_values[key] != second_values[key]
    ]
    return ", ".join(differences) or None
