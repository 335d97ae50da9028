"""Results of an evaluation per task, per suite and overall, with confidence intervals and comparisons."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.channels.layout import decode_instruction
from embodyrl.errors import WorkerError
from embodyrl.monitor.history import EpisodeRow, compute_score, group_by_task
from embodyrl.monitor.intervals import Mean, Rate, Score
from embodyrl.plan.initial_states import own_tasks
from embodyrl.reports.card import format_protocol
from embodyrl.reports.paired import PairedComparison
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.text.answers import final_answer
from embodyrl.text.messages import restore_image_placeholders, split_messages
from embodyrl.types import EnvSpec, Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Success rate and mean return of one task, or of all tasks, with 95 % confidence intervals over initial states."""

    task_id: int
    """Task id; -1: all tasks together."""
    task: str
    episodes: int
    states: int
    """Number of distinct initial states."""
    solved: int | None
    """Number of initial states with at least one success; None: the environment does not report success."""
    voted: float | None
    """Fraction of initial states whose majority answer is correct; None: one answer per state, or not a text task."""
    effective_episodes: float
    """Effective number of independent episodes."""
    successes: int | None
    """Number of successful episodes. This and the next four fields are None if the environment reports no success."""
    success_once: float | None
    low: float | None
    high: float | None
    success_at_end: float | None
    mean_return: float
    return_low: float | None
    """Lower confidence bound of the mean return. This and the next field are None for a single initial state."""
    return_high: float | None
    mean_steps: float
    suite: str = ""
    """Name of the task's suite; empty if there is only one suite."""
    number: int = -1
    """Index of the task in the suite; -1: several tasks."""

    @property
    def rate(self) -> Rate:
        """Success rate; 0 if the environment reports only returns."""
        return Rate(self.successes or 0, self.episodes, self.states, self.effective_episodes)

    @property
    def score(self) -> Score:
        """Success rate, or the mean return if success is unknown."""
        if self.successes is not None:
            return self.rate
        low = -math.inf if self.return_low is None else self.return_low
        high = math.inf if self.return_high is None else self.return_high
        return Mean(self.mean_return, (low, high), self.episodes, self.states, self.effective_episodes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EvalResult:
    """Result of an evaluation, with its metrics, folder and videos."""

    dropped: int
    """Number of episodes that were dropped after repeated worker crashes and are not part of the results."""
    overall: TaskResult
    """Results over all tasks of the main suite, which is the suite of the environment."""
    tasks: tuple[TaskResult, ...]
    folder: Path
    recordings: tuple[tuple[int, str], ...]
    """(episode id, path) of each kept recording."""
    wall_s: float
    env_steps: int
    lengths: tuple[int, int]
    """Minimum and maximum episode length in steps, within the main suite."""
    cut_off: float | None
    """Fraction of replies that reached the token limit; None: not a text task, or a game with its own limit."""
    solved_at_reset: tuple[int, ...] = ()
    """Ids of episodes whose goal is reached before the first action; the results include these episodes."""
    suites: tuple[TaskResult, ...] = ()
    """Results of each suite, the main suite first; empty if only one suite was evaluated."""
    protocol: dict[str, Any] | None = field(default=None)
    """Requested evaluation protocol and the settings that differ from this protocol; None: no protocol requested."""

    def __repr__(self) -> str:
        return f"EvalResult({self.overall.score}, {len(self.tasks)} tasks, {self.folder})"

    @property
    def exit_code(self) -> int:
        """Exit code of a command with this result: nonzero if episodes were dropped."""
        return WorkerError.exit_code if self.dropped else 0

    @property
    def step(self) -> int:
        """Training step of the evaluated weights."""
        return int(self.folder.name.removeprefix("step_"))

    @property
    def videos(self) -> tuple[str, ...]:
        """Paths of the recordings."""
        return tuple(path for _, path in self.recordings)

    @property
    def dropped_warning(self) -> str:
        """Warning about dropped episodes."""
        planned = self.dropped + sum(row.episodes for row in self.tasks)
        return (
            f"INCOMPLETE: {self.dropped} of {planned} episodes crashed their simulator repeatedly and are not "
            "counted; long and failed episodes crash more often, so the success rate may be too high"
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the result by name, such as `eval/success_once`."""
        rows = {
            "eval/success_once": self.overall.success_once,
            "eval/success_at_end": self.overall.success_at_end,
            "eval/return": self.overall.mean_return,
            "eval/episode_len": self.overall.mean_steps,
            "eval/episode_len_min": float(self.lengths[0]),
            "eval/episode_len_max": float(self.lengths[1]),
            "eval/cut_off": self.cut_off,
            "eval/episodes": float(self.overall.episodes),
            "eval/effective_episodes": self.overall.effective_episodes,
            "eval/dropped_episodes": float(self.dropped),
            "eval/solved_at_reset": float(len(self.solved_at_reset)),
        }
        if self.overall.solved is not None and self.overall.states < self.overall.episodes:
            rows["eval/pass_at_n"] = self.overall.solved / self.overall.states
            rows |= {} if self.overall.voted is None else {"eval/maj_at_n": self.overall.voted}
        rows |= {f"eval/task_{row.task_id}/success_once": row.success_once for row in self.tasks}
        for row in self.suites[1:]:
            rows |= {f"eval/{row.task}/success_once": row.success_once, f"eval/{row.task}/return": row.mean_return}
            rows |= {f"eval/{row.task}/effective_episodes": row.effective_episodes}
        return {name: value for name, value in rows.items() if value is not None}


def print_table(result: EvalResult, write_line: Callable[[str], None]) -> None:
    """Print the result of an evaluation: tasks, suites, protocol and files."""
    if result.dropped:
        write_line(f"  {result.dropped_warning}")
    has_success = result.overall.success_once is not None
    score_title = f"{'success' if has_success else 'return'}, 95 % interval"
    if result.suites:
        _print_matrix(result, score_title, write_line)
    else:
        table = [("task", score_title, "steps", "return" if has_success else "")]
        table += [
            (row.task, str(row.score), f"{row.mean_steps:.0f}", f"{row.mean_return:.4g}" if has_success else "")
            for row in (*result.tasks, result.overall)
        ]
        _print_table(table, write_line)
    if result.solved_at_reset:
        count, total = len(result.solved_at_reset), sum(row.episodes for row in result.tasks)
        numbers = ", ".join(map(str, result.solved_at_reset[:20])) + (", ..." if count > 20 else "")
        write_line(f"  warning  {count} of {total} episodes start with the goal already reached: {numbers}")
    if result.protocol is not None:
        write_line(f"  protocol {format_protocol(result.protocol)}")
    speed = result.env_steps / result.wall_s if result.wall_s else 0.0
    write_line(f"  {result.env_steps} env steps in {result.wall_s:.1f} s ({speed:.0f} env steps/s)")
    write_line(f"  results  {result.folder}/eval.json, episodes.jsonl")
    for path in result.videos[:10]:
        write_line(f"  video    {path}")
    if len(result.videos) > 10:
        write_line(f"  video    {len(result.videos) - 10} more in {Path(result.videos[0]).parent}")


def _print_matrix(result: EvalResult, score_title: str, write_line: Callable[[str], None]) -> None:
    """Print scores by task and suite, then each suite's score, interval and difference from the first suite."""
    suites = result.suites
    scores = {(row.number, row.suite): row.score.short for row in result.tasks}
    names = {row.number: row.task for row in reversed(result.tasks)}  # task names of the first suite
    table = [["task", *(suite.task for suite in suites)]]
    table += [[names[number], *(scores.get((number, suite.task), "-") for suite in suites)] for number in sorted(names)]
    _print_table(table, write_line)
    main_score = suites[0].score
    changes = ["", *(main_score.change(suite.score) for suite in suites[1:])]
    rows = [(suite.task, str(suite.score), change) for suite, change in zip(suites, changes, strict=True)]
    _print_table([("suite", score_title, "difference from the first suite"), *rows], write_line)


def _print_table(table: Sequence[Sequence[str]], write_line: Callable[[str], None]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        write_line("  " + "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _summarize_task(
    task_id: int, task: str, episodes: Sequence[EpisodeRow], *, suite: str = "", number: int = -1
) -> TaskResult:
    count, score = len(episodes), compute_score(episodes)
    rate = score if isinstance(score, Rate) else None
    voted = _compute_majority_accuracy(episodes)
    # Sorted, so that a resumed evaluation adds the numbers in the same order.
    mean_return = Mean.of((row.reset_id, row.episode_return) for row in sorted(episodes, key=lambda row: row.episode))
    return TaskResult(
        task_id=task_id,
        task=task,
        episodes=count,
        states=mean_return.states,
        solved=len({(row.task_id, row.reset_id) for row in episodes if row.success_once}) if rate else None,
        voted=voted if rate and mean_return.states < count else None,
        effective_episodes=count if score.effective_n is None else score.effective_n,
        successes=rate.successes if rate else None,
        success_once=rate.value if rate else None,
        low=rate.interval[0] if rate else None,
        high=rate.interval[1] if rate else None,
        success_at_end=sum(bool(row.success_at_end) for row in episodes) / count if rate else None,
        mean_return=mean_return.value,
        return_low=mean_return.interval[0] if mean_return.states > 1 else None,
        return_high=mean_return.interval[1] if mean_return.states > 1 else None,
        mean_steps=sum(row.steps for row in episodes) / count,
        suite=suite,
        number=number,
    )


def summarize(rows: Sequence[EpisodeRow], collection: RolloutResult, env: EnvSpec, folder: Path) -> EvalResult:
    """Build an EvalResult from episodes; `overall` covers only the main suite."""
    ids = sorted({row.task_id for row in rows})
    by_suite = {env.get_suite(task): [row for row in rows if row.suite == env.get_suite(task)] for task in ids}
    main_rows = next(iter(by_suite.values())) if env.benchmark.suites else rows
    tasks = []
    for task in ids:
        task_rows = [row for row in rows if row.task_id == task]
        position = {"suite": task_rows[0].suite, "number": task % len(own_tasks(env))}
        tasks.append(_summarize_task(task, env.tasks[task], task_rows, **position))
    return EvalResult(
        overall=_summarize_task(-1, "overall", main_rows),
        tasks=tuple(tasks),
        suites=tuple(_summarize_task(-1, name, suite_rows) for name, suite_rows in by_suite.items())
        if env.benchmark.suites
        else (),
        dropped=collection.dropped,
        folder=folder,
        recordings=tuple((row.episode, row.video) for row in rows if row.video),
        wall_s=collection.stats.wall_s,
        env_steps=collection.stats.env_steps,
        lengths=(min(row.steps for row in main_rows), max(row.steps for row in main_rows)),
        cut_off=sum(row.truncated for row in main_rows) / len(main_rows) if env.limits_replies else None,
        solved_at_reset=tuple(sorted(row.episode for row in rows if row.solved_at_reset)),
    )


def summarize_episodes(rows: Sequence[EpisodeRow]) -> list[TaskResult]:
    """Return the results of each task, and of all tasks of the main suite; empty without episodes."""
    groups = group_by_task(rows).items() if rows else ()
    return [_summarize_task(task, "overall" if task < 0 else group[0].task, group) for task, group in groups]


def to_episode_row(episode: Episode, env: EnvSpec) -> EpisodeRow:
    """Convert an episode to a row of `episodes.jsonl`. The return is divided by `EnvSpec.reward.factor`."""
    task_id = episode.spec.task_id
    # An environment that does not declare success may report success at the end of an episode.
    has_success = env.reward.reports_success or episode.success_once
    turns = _get_turns(episode.instruction)
    # In text tasks, the instruction contains all messages of a conversation, or the last message of a game.
    has_task_name = bool(turns) or env.text.max_replies > 1
    suite = env.benchmark.suites[task_id] if env.benchmark.suites else ""
    first_state = env.get_reset_ids(env.benchmark.suites.index(suite) if env.benchmark.suites else 0).start
    return EpisodeRow(
        episode=episode.spec.episode_id,
        task_id=episode.spec.task_id,
        task=env.tasks[task_id] if has_task_name else episode.instruction,
        reset_id=episode.spec.reset_id,
        seed=episode.spec.seed,
        success_once=episode.success_once if has_success else None,
        success_at_end=episode.success_at_end if has_success else None,
        episode_return=episode.episode_return / env.reward.factor,
        steps=episode.length,
        terminated=episode.terminated,
        truncated=episode.truncated,
        seconds=round(episode.duration_s, 3),
        video=episode.video,
        solved_at_reset=episode.solved_at_reset,
        suite=suite,
        state=episode.spec.reset_id - first_state,
        conversation=turns,
        logprobs=tuple(tokens for row in episode.top for tokens in json.loads(decode_instruction(row) or "[]")),
    )


def _get_turns(instruction: str) -> tuple[tuple[str, str], ...]:
    """Return the (role, text) pairs of a conversation's turns; empty for any other instruction."""
    turns = [(turn.role, restore_image_placeholders(turn.content)) for turn in split_messages(instruction)]
    return tuple(turns) if len(turns) > 1 else ()


def _compute_majority_accuracy(episodes: Sequence[EpisodeRow]) -> float | None:
    """Return the majority-vote accuracy (self-consistency, arXiv 2203.11171); ties go to the earliest answer."""
    answers_by_state: dict[tuple[int, int], dict[str, list[bool]]] = {}
    for episode in sorted(episodes, key=lambda row: row.episode):
        if not episode.conversation or episode.conversation[-1][0] != "assistant":
            return None  # no text, or a game that ends with an observation
        answers = answers_by_state.setdefault((episode.task_id, episode.reset_id), {})
        answers.setdefault(final_answer(episode.conversation[-1][1]), []).append(bool(episode.success_once))
    # Equal answers have equal rewards, except code with different text around it.
    majorities = [max(answers.values(), key=len)[0] for answers in answers_by_state.values()]
    return sum(majorities) / len(majorities)


def compare_results(first: EvalResult, last: EvalResult) -> list[tuple[str, Score, Score]]:
    """Return (name, score before training, score after) per task, overall and per suite, for the same episodes."""
    main_suite = first.suites[0].task if first.suites else ""
    earlier = {row.task_id: row for row in first.tasks if row.suite == main_suite}
    pairs = [(row.task, earlier[row.task_id], row) for row in last.tasks if row.task_id in earlier]
    if len(pairs) > 1:
        pairs.append(("all tasks", first.overall, last.overall))
    pairs += [(suite.task, suite, later) for suite, later in zip(first.suites[1:], last.suites[1:], strict=False)]
    # Compare success rates if one of the evaluations reports success.
    return [
        (name, before.score, after.score)
        if before.successes is None and after.successes is None
        else (name, before.rate, after.rate)
        for name, before, after in pairs
    ]


def build_result_table(
    first: EvalResult, last: EvalResult, paired: Sequence[PairedComparison] = ()
) -> tuple[str, list[tuple[str, str, str, str]]]:
    """Return title and rows (task, first, last, change) of the table at the end of a training run.

    Args:
        first: result of the first validation.
        last: result of the last validation.
        paired: paired test of each suite; the main suite is first.
    """
    rows = compare_results(first, last)
    others = {test.suite: test for test in paired[1:]}
    own = len(rows) - len([name for name, *_ in rows if name in others]) - 1
    rated = any(isinstance(after, Rate) for _, _, after in rows)
    table = []
    for number, (name, before, after) in enumerate(rows):
        test = paired[0] if paired and number == own else others.get(name)
        change = before.change(after) + " points" * (rated and after.episodes > 0 < before.episodes)
        table.append((name, before.short, after.short, f"{change} ({test.summary})" if test else change))
    return f"validation {'success' if rated else 'return'}", table
