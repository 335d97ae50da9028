"""Logger to the terminal: a live dashboard on a TTY, otherwise one line per step."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live

from embodyrl.files import has_room
from embodyrl.monitor.history import METRICS_FILE, read_rows
from embodyrl.monitor.phases import format_rough_duration
from embodyrl.monitor.protocol import Monitor, ResultRow, RunInfo

if TYPE_CHECKING:
    from embodyrl.monitor.dashboard import Dashboard

PROGRESS_PERIOD_S = 30.0
"""Minimum time in seconds between two progress lines without a TTY."""

LABEL_WIDTH = 12
"""Width of the labels of banner lines, in characters."""

_WRITE_TIMEOUT_S = 1.0
"""Maximum time in seconds to wait while the output pipe is full; after this time, lines are dropped."""
_MAX_WRITE_LENGTH = 1024
"""Number of characters per write. A pipe that is ready for writing accepts this number without blocking."""

_FIELDS: tuple[tuple[str, str], ...] = (
    ("time/step", "{:.1f} s"),
    ("eval/success_once", "validation success {:.1%}"),
    ("eval/return", "validation return {:.4g}"),
    ("eval/loss", "validation loss {:.4f}"),
    ("eval/token_accuracy", "validation token accuracy {:.1%}"),
    ("eval/accuracy", "validation accuracy {:.1%}"),
    ("eval/action_error", "validation action error {:.4g}"),
    ("train/success_once", "success {:.1%}"),
    ("train/return", "return {:.4g}"),
    ("train/cut_off", "cut off {:.1%}"),
    ("train/token_accuracy", "training token accuracy {:.1%}"),
    ("train/accuracy", "training accuracy {:.1%}"),
    ("train/action_error", "training action error {:.4g}"),
    ("actor/loss", "training loss {:.4f}"),
    ("actor/kl", "kl {:z.4f}"),
    ("actor/grad_norm", "grad norm {:.2g}"),
    ("env/steps_per_s", "{:.0f} steps/s"),
    ("env/restarts", "{:.0f} worker restarts"),
)


def step_line(step: int, total: int, metrics: Mapping[str, float], left: str = "") -> str:
    """Format the metrics of a training step as a line that ends with the remaining time `left`; omit missing metrics.

    >>> step_line(3, 100, {"time/step": 12.41, "train/success_once": 0.25, "train/episodes": 8.0})
    'step   3/100  12.4 s  success 25.0 % of 8'
    """
    parts = [f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"]
    for name, form in _FIELDS:
        if name in metrics and not _is_redundant(name, metrics):
            text = form.format(metrics[name]).replace("%", " %")
            parts.append(text + (f" of {metrics['train/episodes']:.0f}" if name == "train/success_once" else ""))
    return "  ".join([*parts, *([f" {left}"] if left else [])])


def _is_redundant(name: str, metrics: Mapping[str, float]) -> bool:
    """Return True for a return that equals the success rate, a policy-gradient loss, and a restart count of zero."""
    kind, _, what = name.partition("/")
    success = metrics.get(f"{kind}/success_once")
    if what == "return":
        return success is not None and (kind == "eval" or metrics[name] == success)
    if name == "actor/loss":  # with rollouts, the loss does not indicate progress
        return "train/return" in metrics
    return name == "env/restarts" and not metrics[name]


class ConsoleMonitor(Monitor):
    """Logger that prints to a text stream, by default standard output, without colors if NO_COLOR is set."""

    prompt = True

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        self._clock = clock
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._total = 0
        self._last_step = 0
        self._steps, self._seconds = 0, 0.0
        """Number and duration of the logged steps."""
        self._dashboard: Dashboard | None = None
        self._live_display: Live | None = None
        self._last_output = clock()
        self._num_dropped_lines = 0
        """Number of dropped output lines."""

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """See `Monitor.open`."""
        self._total = info.total_steps
        self._last_step = max(0, (info.resume_step or 0) - 1)
        self._last_output = self._clock()
        if self._live:
            from embodyrl.monitor.dashboard import Dashboard

            self._dashboard = Dashboard(info)
            for row in read_rows(run_dir / METRICS_FILE) if info.resume_step else ():
                if row.get("step", 0) < info.resume_step:
                    self._dashboard.log(row.get("step", 0), row)
            # Without training steps, the display is only a progress bar, which is erased at the end.
            self._live_display = Live(
                self._dashboard, console=self._console, refresh_per_second=4, transient=not info.total_steps
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of a step, or show them on the dashboard (see `Monitor.log`)."""
        if self._dashboard is not None and self._total:
            self._dashboard.log(step, metrics)
        else:
            self._write(step_line(step, self._total, metrics, self._time_left(step, metrics)))

    def _time_left(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the expected time until the end of training, from the mean duration of the logged steps."""
        steps, self._last_step = max(0, step - self._last_step), step
        self._steps += steps
        self._seconds += metrics.get("time/step", 0.0) * steps + metrics.get("time/validate", 0.0)
        if not self._seconds or not self._steps or step >= self._total:
            return ""
        return f"{format_rough_duration(self._seconds / self._steps * (self._total - step))} left"

    def text(self, line: str) -> None:
        """See `Monitor.text`."""
        if self._dashboard is not None and self._total:
            self._dashboard.event(f"{time.strftime('%H:%M:%S')} {line}")
        else:
            self._write(self._wrap(line))

    def banner(self, lines: Sequence[str]) -> None:
        """Print the lines of the banner, and start the dashboard (see `Monitor.banner`)."""
        for line in lines:
            self._write(self._wrap(line))
        if self._live_display is not None:
            self._live_display.start()

    def progress(self, done: int, total: int, what: str) -> None:
        """Print the progress of a long phase from time to time (see `Monitor.progress`)."""
        if self._dashboard is not None:
            self._dashboard.progress(done, total, what)
        elif self._clock() - self._last_output >= PROGRESS_PERIOD_S:
            self._write(f"{what}: {done} of {total} done" if total else f"{what} ...")

    def results(self, title: str, rows: Sequence[ResultRow]) -> None:
        """See `Monitor.results`."""
        self._stop_dashboard()
        table = [(title, "first", "last", "change"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, first, last, change in table:
            cells = f"{name:<{widths[0]}}  {first:<{widths[1]}}  {last:<{widths[2]}}"
            self._write(self._wrap(f"{cells}  {change}", sum(widths[:3]) + 6))

    def close(self) -> None:
        """See `Monitor.close`."""
        self._stop_dashboard()

    def _stop_dashboard(self) -> None:
        """Stop updating the live dashboard; later lines are printed below the dashboard."""
        if self._live_display is not None and has_room(self._stream, _WRITE_TIMEOUT_S):
            self._live_display.stop()
        self._live_display = self._dashboard = None

    def _wrap(self, text: str, indent: int = LABEL_WIDTH + 3) -> str:
        """Wrap lines to the terminal's width; indent continuation lines as in the banner, and do not split paths."""
        if not self._live:
            return text
        width = self._console.width
        wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        wrapper.subsequent_indent = " " * min(indent, width // 2)
        return "\n".join(map(wrapper.fill, text.split("\n")))

    def _write(self, line: str) -> None:
        self._last_output = self._clock()
        if not has_room(self._stream, 0.0 if self._num_dropped_lines else _WRITE_TIMEOUT_S):
            self._num_dropped_lines += 1
            return
        if self._num_dropped_lines:
            line = f"({self._num_dropped_lines} lines were dropped: the output was blocked)\n{line}"
            self._num_dropped_lines = 0
        if self._live:
            self._console.print(line, markup=False, soft_wrap=True)
            return
        # Pipes and log files get the line unwrapped, for any terminal width.
        line += "\n"
        for start in range(0, len(line), _MAX_WRITE_LENGTH):
            if has_room(self._stream, _WRITE_TIMEOUT_S):
                self._stream.write(line[start : start + _MAX_WRITE_LENGTH])
                self._stream.flush()
