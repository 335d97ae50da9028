"""Results of a run, read from the files of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from pydantic_core import from_json

from embodyrl.config.tree import read_plain_yaml
from embodyrl.errors import ConfigError
from embodyrl.files import by_number
from embodyrl.monitor.intervals import Mean, Rate, Score

EVENTS_FILE = Path("logs") / "events.log"
EPISODES_FILE = "episodes.jsonl"
TABLE_FILE = "eval.json"
METRICS_FILE = "metrics.jsonl"
COSTS_FILE = "costs.jsonl"
"""Wall-clock and CPU seconds of each attempt of a run."""
VIDEO_FOLDER = "videos"
"""Video folder of a run, unless `video_cfg.base_dir` is set."""


_DOUBTS = 5
"""Number of a reply's least probable tokens to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode of an evaluation, a row of `episodes.jsonl`."""

    episode: int
    task_id: int
    task: str
    reset_id: int
    seed: int
    success_once: bool | None
    """None: the environment reports no success."""
    success_at_end: bool | None
    episode_return: float
    steps: int
    terminated: bool
    truncated: bool
    seconds: float
    video: str | None
    suite: str = ""
    """Suite of the task, if an evaluation has several."""
    state: int | None = None
    """Index of the initial state in its suite; missing in files of earlier versions."""
    conversation: tuple[tuple[str, str], ...] = ()
    """(role, text) of every turn of a text task, including the last reply."""
    solved_at_reset: bool = False
    """The goal was already reached before the first action."""
    logprobs: tuple[Sequence[tuple[str, float]], ...] = ()
    """`rollout.logprobs`: for each token of all replies (text, log-probability), then of the most probable tokens."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EpisodeRow:
        """Parse one row; unknown fields are ignored."""
        values = {name: raw[name] for name in _KINDS}
        if wrong := [name for name, kind in _KINDS.items() if not isinstance(values[name], kind)]:
            raise TypeError(*wrong)
        turns = tuple((str(role), str(text)) for role, text in raw.get("conversation", ()))
        top = tuple([(str(text), float(value)) for text, value in token] for token in raw.get("logprobs", ()))
        more = {"suite": str(raw.get("suite", "")), "conversation": turns, "logprobs": top, "state": raw.get("state")}
        more["solved_at_reset"] = raw.get("solved_at_reset") is True
        return cls(episode_return=float(raw["return"]), **more, **values)

    @property
    def outcome(self) -> str:
        """success, failure, or played if the environment reports no success."""
        known = self.success_once
        return "played" if known is None else "success" if known else "failure"

    @property
    def doubts(self) -> list[str]:
        """Least probable tokens of the replies, in order, with the most probable alternatives (`rollout.logprobs`)."""
        least = sorted(sorted(range(len(self.logprobs)), key=lambda i: self.logprobs[i][0][1])[:_DOUBTS])
        told = [(i, *(f"{json.dumps(t, ensure_ascii=False)} {p:.2f}" for t, p in self.logprobs[i])) for i in least]
        return [f"token {i + 1}: {said}; most probable {', '.join(top)}" for i, said, *top in told]

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of the row."""
        names = ("return" if f.name == "episode_return" else f.name for f in fields(self))
        return {name: getattr(self, f.name) for name, f in zip(names, fields(self), strict=True)}


_KINDS: Mapping[str, Any] = {
    name: int | float if kind is float else kind
    for name, kind in get_type_hints(EpisodeRow).items()
    if name not in ("episode_return", "suite", "state", "conversation", "logprobs", "solved_at_reset")
}
"""Fields that are stored unchanged."""


_SUCCESS = {"train/success_once", "eval/success_once"}


def score_of(episodes: Sequence[EpisodeRow], *, known: bool = False) -> Score:
    """Return the success rate of episodes, or their mean return if no success is known.

    `known`: other episodes of the evaluation have a known success.
    """
    if episodes and not known and all(e.success_once is None for e in episodes):
        return Mean.of((e.reset_id, e.episode_return) for e in episodes)
    return Rate.of((e.reset_id, bool(e.success_once)) for e in episodes)


def own_suite(episodes: Sequence[EpisodeRow]) -> str:
    """Return the environment's own suite, which has the first tasks."""
    return min(episodes, key=lambda e: e.task_id).suite if episodes else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The episodes of one validation, by episode number."""

    step: int
    episodes: tuple[EpisodeRow, ...]

    @property
    def own(self) -> tuple[EpisodeRow, ...]:
        """Episodes of the environment's own suite; all, unless further suites were evaluated."""
        suite = own_suite(self.episodes)
        return tuple(e for e in self.episodes if e.suite == suite)

    @property
    def suites(self) -> dict[str, Score]:
        """Score of each suite, the environment's own first; empty if there is one."""
        names = dict.fromkeys([own_suite(self.episodes), *(e.suite for e in self.episodes)])
        scores = {name: score_of([e for e in self.episodes if e.suite == name]) for name in names}
        return scores if len(scores) > 1 else {}

    def score(self, task: str | None = None, *, known: bool = False) -> Score:
        """Return the success rate of the own suite, of one task or all; the mean return if success is unknown."""
        return score_of([e for e in self.own if task in (None, e.task)], known=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run folder."""

    folder: Path
    config: Mapping[str, Any]
    rows: tuple[dict[str, float | None], ...]
    """Rows of metrics.jsonl."""
    evaluations: tuple[Evaluation, ...]
    """By step, including those of `embodyrl eval` without metrics."""
    unfinished: Evaluation | None = None
    """The newest evaluation if it is running or was interrupted. It is not in `evaluations`, because the shortest
    episodes, often the successful ones, end first."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.name

    def text(self, name: str | Path) -> str:
        """Return the content of a text file of the run; empty if it is missing or a link to a file outside."""
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if _is_within(path, self.folder) else ""

    def has(self, name: str) -> bool:
        """Return True if a metric has a finite value in any row."""
        return any(row.get(name) is not None for row in self.rows)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric for its finite values."""
        return [(int(row["step"] or 0), float(row[name] or 0)) for row in self.rows if row.get(name) is not None]

    def find_video(self, stored: str) -> Path | None:
        """Return the path of a video, also after the folders were moved together; None if it is missing.

        The run's files are untrusted: only MP4 files in a folder with the run's name are accepted.
        """
        base, name = self.config.get("video_cfg", {}).get("base_dir") or VIDEO_FOLDER, Path(stored).name
        elsewhere = (parent / base / self.name / name for parent in (Path(), *self.folder.parents))
        places = (self.folder / VIDEO_FOLDER / name, *elsewhere)
        return next((path for path in places if path.suffix == ".mp4" and _is_video(path)), None)


def _is_within(path: Path, folder: Path) -> bool:
    """Return True for a file inside the folder. The run is untrusted, and its links may lead to any file."""
    # Untrusted run folder: a link must not expose a file of this machine.
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def _is_video(path: Path) -> bool:
    if not path.is_file() or path.is_symlink() or path.parent.is_symlink():
        return False
    with path.open("rb") as file:
        return file.read(12)[4:8] == b"ftyp"


_NUMBERS = {int, float, NoneType}
_LONGEST_LINE = 1 << 24
"""Maximum bytes of a line, and of the end of a file that is searched for the newest values."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file; empty if it is missing. Truncated lines are skipped."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [*_rows(iter(partial(file.readline, _LONGEST_LINE), b""))]


def _rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = from_json(line, cache_strings="keys")  # five times as fast as json.loads
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step", 0), int):
            yield row


def newest_values(path: Path, names: Sequence[str]) -> list[Any]:
    """Return the last value of each metric in a JSON lines file, or None; only rows with the metrics are parsed."""
    lines: list[bytes] = []
    if path.is_file():
        with path.open("rb") as file:
            # From the end: listing runs needs only the last values of many files.
            file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
            lines = file.read(_LONGEST_LINE).splitlines()[::-1]
    found = []
    for name in names:
        rows = _rows(line for line in lines if f'"{name}"'.encode() in line)
        found.append(next((row[name] for row in rows if name in row), None))
    return found


def read_episodes(path: Path) -> list[EpisodeRow]:
    """Read the rows of an `episodes.jsonl`, sorted by episode number.

    Raises:
        ConfigError: a row lacks a field.
    """
    try:
        return sorted((EpisodeRow.from_json(row) for row in read_rows(path)), key=lambda e: e.episode)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a row has no usable {error}; the file is damaged, move it away.") from error


def read_table(folder: Path) -> dict[str, Any]:
    """Read the totals of an evaluation from the `eval.json` of its folder; empty if it is missing.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / TABLE_FILE
    if not path.is_file():
        return {}
    try:
        found = {"wall_s": 0.0, "env_steps": 0, "dropped": 0} | from_json(path.read_bytes())
        good = all(isinstance(found[name], int | float) for name in ("wall_s", "env_steps", "dropped"))
        good = good and isinstance(found.get("protocol"), dict | None)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ConfigError(f"{path}: not an evaluation table; the file is damaged, move it away.")
    return found


def read_history(folder: Path) -> History:
    """Read a run.

    Raises:
        ConfigError: the folder is not a run.
    """
    file = folder / "config.yaml"
    if not _is_within(file, folder):
        raise ConfigError(
            f"{folder}: there is no config.yaml, so this is not a run; `embodyrl list runs` shows the runs."
        )
    evaluations, unfinished = [], None
    for path in sorted(folder.glob(f"eval/step_*/{EPISODES_FILE}"), key=by_number):
        step = int(path.parent.name.removeprefix("step_"))
        found = Evaluation(step=step, episodes=tuple(read_episodes(path)))
        if (path.parent / TABLE_FILE).is_file():  # written last
            evaluations.append(found)
        else:
            unfinished = found
    rows = [row for row in read_rows(folder / METRICS_FILE) if {*map(type, row.values())} <= _NUMBERS]
    every = [*evaluations, *([unfinished] if unfinished else [])]
    if any(e.success_once is not None for one in every for e in one.episodes) or any(_SUCCESS & {*r} for r in rows):
        # Some environments report success only when it occurs: a missing value means no success.
        evaluations = [_judged(one) for one in evaluations]
        unfinished = unfinished and _judged(unfinished)
        for row in rows:
            row |= {name: 0.0 for name in _SUCCESS - {*row} if f"{name.partition('/')[0]}/return" in row}
    return History(
        folder=folder,
        config=read_plain_yaml(file),
        rows=tuple(rows),
        evaluations=tuple(evaluations),
        unfinished=unfinished,
    )


def _judged(evaluation: Evaluation) -> Evaluation:
    failed = {"success_once": False, "success_at_end": False}
    episodes = (replace(e, **failed) if e.success_once is None else e for e in evaluation.episodes)
    return replace(evaluation, episodes=tuple(episodes))
