"""Live dashboard of a run in a terminal: progress, time per phase, learning curves, tasks, events."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from embodyrl.errors import clean_text
from embodyrl.monitor.intervals import wilson
from embodyrl.monitor.phases import build_time_tree, format_duration, step_seconds, sum_times
from embodyrl.monitor.protocol import RunInfo

_MAX_VALUES, _NUM_RECENT_STEPS, _MAX_EVENTS, _MAX_EVENT_LENGTH, _MAX_TASKS = 240, 20, 5, 240, 10
_BAR_WIDTH_LIMIT, _SIDE_BY_SIDE_WIDTH = 92, 76
"""Minimum terminal widths, in characters: for showing bars, and for showing panes side by side."""
_SPARK_CHARACTERS = "▁▂▃▄▅▆▇█"
_LEARNING_ROWS: tuple[tuple[str, str, str], ...] = (
    ("success (eval)", "eval/success_once", "{:.3f}"),
    ("return (eval)", "eval/return", "{:.3g}"),
    ("success", "train/success_once", "{:.3f}"),
    ("return", "train/return", "{:.3g}"),
    ("cut off", "train/cut_off", "{:.3f}"),
    ("token accuracy", "eval/token_accuracy", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("action error", "eval/action_error", "{:.4g}"),
    ("loss", "actor/loss", "{:.4f}"),
    ("value loss", "actor/value_loss", "{:.4f}"),
    ("KL", "actor/kl", "{:z.4f}"),
    ("clip fraction", "actor/clip_fraction", "{:.3f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("gradient norm", "actor/grad_norm", "{:.3f}"),
)
_SUMMED_METRICS = ("env/steps", "train/episodes", "env/dropped_episodes")
_PROGRESS_ROWS: tuple[tuple[str, str, str], ...] = (
    ("env steps", "env/steps", "{:,.0f}"),
    ("env steps/s", "env/steps_per_s", "{:,.0f}"),
    ("episodes", "train/episodes", "{:,.0f}"),
    ("restarts", "env/restarts", "{:.0f}"),
    ("dropped", "env/dropped_episodes", "{:.0f}"),
    ("envs busy", "rollout/slot_occupancy", "{:.2g}"),
    ("staleness", "rollout/staleness_mean", "{:.2g}"),
    ("tokens/s, update", "actor/tokens_per_s", "{:,.0f}"),
    ("memory", "actor/memory_gib", "{:.1f} GiB"),
)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest `width` values as block characters, scaled to their minimum and maximum.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    visible = list(values)[-width:]
    low, high = min(visible, default=0.0), max(visible, default=0.0)
    max_level = len(_SPARK_CHARACTERS) - 1
    return "".join(
        _SPARK_CHARACTERS[round((v - low) / (high - low) * max_level) if high > low else max_level // 2]
        for v in visible
    )


class Dashboard:
    """Dashboard of a run, rendered with rich."""

    def __init__(self, info: RunInfo, clock: Callable[[], float] | None = time.monotonic) -> None:
        """Create an empty dashboard; without `clock`, the elapsed time is the sum over the logged steps."""
        self.info = info
        self._values: dict[str, deque[float]] = {}
        self._rows: deque[Mapping[str, float | None]] = deque(maxlen=_NUM_RECENT_STEPS)
        self._last: dict[str, float] = {}
        self._seconds = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._events: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._phase, self._fraction = "", 0.0
        self._clock = clock
        self._start_time = clock() if clock else 0.0

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of a step."""
        self._last["step"] = step
        for name, value in metrics.items():
            if value is not None:
                self._last[name] = value
                self._values.setdefault(name, deque(maxlen=_MAX_VALUES)).append(value)
        if seconds := step_seconds(metrics):
            self._rows.append(metrics)
            self._seconds += seconds
            for name in _SUMMED_METRICS:
                self._sums[name] += metrics.get(name) or 0.0
        self._phase = ""

    def event(self, line: str) -> None:
        """Append a line to the list of events."""
        self._events.append(line)

    def progress(self, done: int, total: int, what: str) -> None:
        """Show the progress of the current phase."""
        self._phase = f"{what}: {done} of {total} done" if total else what
        self._fraction = done / total if total else 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.info.total_steps:
            yield Text.assemble((_format_bar(self._fraction, 30), "green"), " ", self._phase)
            return
        gap, bar, spark = (
            (2, 8, 10)
            if options.max_width >= _BAR_WIDTH_LIMIT
            else (1, 0, 5 if options.max_width >= _SIDE_BY_SIDE_WIDTH else 8)
        )
        panes = {"Progress": self._progress(), "Time per phase": self._time(bar), "Learning": self._learning(spark)}
        parts: list[RenderableType] = [Group(Text(title, style="bold cyan"), table) for title, table in panes.items()]
        if options.max_width >= _SIDE_BY_SIDE_WIDTH:
            grid = Table.grid(expand=True, padding=(0, gap, 0, 0))
            grid.add_row(*parts)
            parts = [grid]
        if tasks := self._tasks():
            parts += [Rule(style="dim"), Text("Success per task, and history", style="bold cyan"), tasks]
        if self._events:
            parts += [Rule(style="dim"), *(Text(e[:_MAX_EVENT_LENGTH], overflow="fold") for e in self._events)]
        title = Text.assemble(("embodyrl", "bold"), f" {clean_text(self.info.run_id)}")
        yield Panel(Group(*parts), title=title, subtitle=self._status(), title_align="left")

    def _status(self) -> str:
        step, total = int(self._last.get("step", self.info.resume_step or 0)), self.info.total_steps
        parts = [f"step {step}/{total}"]
        if self._rows and total > step:
            mean = sum(map(step_seconds, self._rows)) / len(self._rows)
            parts.append(f"ETA {format_duration(mean * (total - step))}")
        live = f"{format_duration(self._clock() - self._start_time)} so far" if self._clock else ""
        parts += [live or f"{format_duration(self._seconds)} in steps", *([self._phase] if self._phase else [])]
        return " · ".join(parts)

    def _progress(self) -> Table:
        table, values = _build_grid(2), self._last | self._sums
        for name, metric, form in _PROGRESS_ROWS:
            if metric in self._last:
                table.add_row(name, form.format(values[metric]))
        return table

    def _time(self, width: int) -> Table:
        table = _build_grid(4 if width else 3)
        means = {name: seconds / len(self._rows) for name, seconds in sum_times(self._rows).items()}
        for phase in build_time_tree(means):
            bar = "█" * min(width, max(1, round(width * phase.share))) if phase.share >= 0.005 else ""
            name = Text(("  " if phase.depth else "") + phase.name, style="dim" if phase.depth else "")
            row = name, f"{phase.seconds:.1f} s", f"{100 * phase.share:3.0f} %"
            table.add_row(*row, *([Text(bar, style="blue")] if width else []))
        return table

    def _learning(self, width: int) -> Table:
        table = _build_grid(3)
        for name, metric, form in _LEARNING_ROWS:
            kind, what = metric.split("/")
            # A reward of 1 per success would duplicate the success rate.
            repeated = what == "return" and self._values.get(metric) == self._values.get(f"{kind}/success_once")
            if metric in self._values and not repeated:
                text = form.format(self._last[metric])
                episodes = self._last.get(f"{kind}/effective_episodes", self._last.get(f"{kind}/episodes"))
                if metric.endswith("/success_once") and episodes:
                    low, high = wilson(min(1.0, self._last[metric]) * episodes, episodes)
                    text += f" [dim]±{(high - low) / 2:.2f}[/]"
                table.add_row(name, text, Text(sparkline(self._values[metric], width), style="green"))
        return table

    def _tasks(self) -> Table | None:
        """Return the table of success per task in the newest validation; only the weakest tasks if there are many."""
        task_rows = []
        for number, task in enumerate(self.info.tasks):
            metric = next(
                (m for k in ("eval", "train") if (m := f"{k}/task_{number}/success_once") in self._last), None
            )
            if metric is not None:
                task_rows.append((self._last[metric], task, metric))
        if len(task_rows) < 2:
            return None
        table = _build_grid(4)
        weakest = sorted(task_rows)[:_MAX_TASKS]
        for value, task, metric in (row for row in task_rows if row in weakest):  # keep the order of tasks
            table.add_row(
                Text(clean_text(task[:48])),
                f"{value:.2f}",
                Text(_format_bar(value, 10), style="green"),
                Text(sparkline(self._values[metric], 16), style="dim"),
            )
        if len(task_rows) > _MAX_TASKS:
            table.add_row(f"[dim]{len(task_rows) - _MAX_TASKS} better tasks[/]")
        return table


def _format_bar(share: float, width: int) -> str:
    return "█" * round(width * share) + "░" * (width - round(width * share))


def _build_grid(columns: int) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for side in ("left", "right", "right", "left")[:columns]:
        table.add_column(justify=side, no_wrap=True)
    return table


def replay_metrics(info: RunInfo, rows: Iterable[Mapping[str, float | None]], events: Iterable[str]) -> Dashboard:
    """Build the dashboard of a run from metric rows and event lines."""
    board = Dashboard(info, clock=None)
    for row in rows:
        board.log(int(row["step"] or 0), row)
    for line in events:
        board.event(line)
    return board
