"""Logger to the terminal: a live dashboard on a TTY, otherwise one line per step."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.live import Live

from embodyrl.files import has_room
from embodyrl.monitor.history import METRICS_FILE, read_rows
from embodyrl.monitor.intervals import Score
from embodyrl.monitor.protocol import Monitor, RunInfo
from embodyrl.monitor.timing import PHASES, step_seconds

if TYPE_CHECKING:
    from embodyrl.monitor.dashboard import Dashboard

PROGRESS_PERIOD_S = 30.0
"""Minimum time in seconds between two progress lines without a TTY."""

_WRITE_TIMEOUT_S = 1.0
"""Maximum time in seconds to wait while the output pipe is full; after this time, lines are dropped."""
_MAX_WRITE_LENGTH = 1024
"""Number of characters per write. A pipe that is ready for writing accepts this number without blocking."""

_FIELDS: tuple[tuple[str, str], ...] = (
    ("time/step", "{:.1f} s"),
    ("eval/success_once", "eval {:.3f}"),
    ("eval/return", "eval return {:.4g}"),
    ("eval/loss", "val loss {:.4f}"),
    ("eval/token_accuracy", "val acc {:.3f}"),
    ("train/token_accuracy", "train acc {:.3f}"),
    ("eval/action_error", "val error {:.4g}"),
    ("train/action_error", "train error {:.4g}"),
    ("eval/accuracy", "val acc {:.3f}"),
    ("train/accuracy", "train acc {:.3f}"),
    ("train/success_once", "success {:.3f} ({:.0f} ep)"),
    ("train/return", "return {:.2f}"),
    ("train/cut_off", "cut off {:.2f}"),
    ("actor/loss", "loss {:.4f}"),
    ("actor/kl", "kl {:.4f}"),
    ("actor/grad_norm", "gn {:.2f}"),
    ("env/steps_per_s", "{:.0f} env steps/s"),
    ("env/restarts", "restarts {:.0f}"),
)


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Format the metrics of a training step as one line; missing metrics are omitted.

    >>> step_line(3, 100, {"time/step": 12.41, "train/success_once": 0.25, "train/episodes": 8.0})
    'step 3/100 | 12.4 s | success 0.250 (8 ep)'
    """
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    parts += [
        form.format(metrics[name], metrics.get("train/episodes", 0))
        for name, form in _FIELDS
        if name in metrics and not _is_redundant(name, metrics)
    ]
    if longest_phases := _format_longest_phases(metrics):
        parts.append(longest_phases)
    return " | ".join(parts)


def _is_redundant(name: str, metrics: Mapping[str, float]) -> bool:
    """Return True if the metric is the validation return and a success rate is shown instead."""
    return name == "eval/return" and "eval/success_once" in metrics


def _format_longest_phases(metrics: Mapping[str, float]) -> str:
    """Format the three longest phases of a step, including validation, with their percentages of the step's time."""
    total = step_seconds(metrics)
    # Disjoint parts; they run in parallel, so their shares may add up to more than 100 %.
    names = [part for name, parts in PHASES.items() for part in parts or (name,)]
    phases = {name: metrics[f"time/{name}"] for name in names if f"time/{name}" in metrics}
    if not total:
        return ""
    longest = sorted(phases.items(), key=lambda item: -item[1])[:3]
    return " ".join(f"{name} {100 * value / total:.0f}%" for name, value in longest if value / total >= 0.005)


class ConsoleMonitor(Monitor):
    """Logger that prints to a text stream, by default standard output, without colours if NO_COLOR is set."""

    prompt = True

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        self._clock = clock
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._total = 0
        self._dashboard: Dashboard | None = None
        self._live_display: Live | None = None
        self._last_output = clock()
        self._num_dropped_lines = 0
        """Number of dropped output lines."""

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """See `Monitor.open`."""
        self._total = info.total_steps
        self._last_output = self._clock()
        if self._live:
            from embodyrl.monitor.dashboard import Dashboard

            self._dashboard = Dashboard(info)
            for row in read_rows(run_dir / METRICS_FILE) if info.resume_step else ():
                if row.get("step", 0) < info.resume_step:
                    self._dashboard.log(row.get("step", 0), row)
            # Without training steps, the display is a progress bar, which is not kept.
            self._live_display = Live(
                self._dashboard, console=self._console, refresh_per_second=4, transient=not info.total_steps
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of a step, or show them on the dashboard (see `Monitor.log`)."""
        if self._dashboard is not None and self._total:
            self._dashboard.log(step, metrics)
        else:
            self._write(step_line(step, self._total, metrics))

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

    def results(self, rows: Sequence[tuple[str, Score, Score]]) -> None:
        """See `Monitor.results`."""
        self._stop_dashboard()
        table = [("task", "first validation", "last validation", "change")]
        table += [(task, str(first), str(last), first.change(last)) for task, first, last in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        is_narrow = self._live and sum(widths) + 6 > self._console.width
        widths[0] = 0 if is_narrow else widths[0]
        for task, *line in table:
            if is_narrow:
                self._write(task)
            line = ["" if is_narrow else task, *line]
            self._write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())

    def close(self) -> None:
        """See `Monitor.close`."""
        self._stop_dashboard()

    def _stop_dashboard(self) -> None:
        """Stop updating the live dashboard; later lines are printed below the dashboard."""
        if self._live_display is not None and has_room(self._stream, _WRITE_TIMEOUT_S):
            self._live_display.stop()
        self._live_display = self._dashboard = None

    def _wrap(self, text: str) -> str:
        """Wrap lines to the terminal's width; indent continuation lines as in the banner, and do not split paths."""
        if not self._live:
            return text
        wrap_options: Any = {"subsequent_indent": " " * 13, "break_long_words": False, "break_on_hyphens": False}
        return "\n".join(textwrap.fill(line, self._console.width, **wrap_options) for line in text.split("\n"))

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
