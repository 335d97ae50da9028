"""The commands `report` (HTML page), `card` (result card) and `view` (terminal dashboard)."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_newest_run, find_run
from embodyrl.errors import ConfigError, clean_text, one_line
from embodyrl.monitor.history import EVENTS_FILE
from embodyrl.reports.history import Evaluation, History, is_running, read_history, select_samples
from embodyrl.reports.samples import format_samples

if TYPE_CHECKING:
    from rich.console import RenderableType
_MAX_REPLIES, _REFRESH_S = 3, 15


def report(args: argparse.Namespace) -> int:
    """Run `embodyrl report`: write or serve an HTML page about runs."""
    from embodyrl.reports.page import write_report

    if args.gif and (args.watch or len(args.arguments) > 1):
        raise ConfigError("--gif shows the episodes of one run. Remove --watch and all but one of the runs.")
    if args.watch and (args.json or not args.port.isdecimal()):
        raise ConfigError("--watch serves a page. Remove --json, and set --port to a number.")
    runs = [find_run(argument) for argument in args.arguments] or [find_newest_run("embodyrl report")]
    name = "report.html" if len(runs) == 1 else f"report_vs_{'_'.join(run.name for run in runs[1:])}.html"
    out = args.out or runs[0] / name
    write = partial(write_report, runs)
    try:
        lines = write(out)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}. Choose another path with --out FILE.") from error
    if args.watch:
        return _watch(args, runs, write)
    if args.gif:
        from embodyrl.reports.media import animate_changes

        try:
            animate_changes(read_history(runs[0]), args.gif)
        except OSError as error:
            raise ConfigError(f"Cannot write {args.gif}: {one_line(error)}. Delete unreadable recordings.") from error
        lines.append(f"gif   {args.gif}")
    show_result(args, {"page": out, "summary": lines}, (*lines, f"page  {out}"))
    if args.open:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
    return 0


def card(args: argparse.Namespace) -> int:
    """Run `embodyrl card`: write the result card of a run."""
    from embodyrl.reports.card import build_card, format_card, write_card

    if len(args.arguments) != 1:
        raise ConfigError("embodyrl card takes one run, for example: embodyrl card runs/my_run.")
    run = find_run(args.arguments[0])
    try:
        paths = write_card(run, args.out)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {args.out or run}: {error.strerror}. Choose another path with --out."
        ) from error
    result_card = build_card(run)
    show_result(args, result_card, (format_card(result_card), *(f"card  {path}" for path in paths)))
    return 0


def _watch(args: argparse.Namespace, runs: Sequence[Path], write: Callable[[Path], object]) -> int:
    """Serve the page on this machine; each request renders the current state of the run."""
    from embodyrl.web_pages.loopback import Answer, LoopbackServer

    def page() -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.html"
            write(out)
            text = out.read_text(encoding="utf-8")
        if any(map(is_running, runs)):
            text = text.replace("<head>", f'<head><meta http-equiv="refresh" content="{_REFRESH_S}">', 1)
        return "text/html; charset=utf-8", text.encode()

    LoopbackServer(int(args.port), {"/": page}, {}).show(open_page=args.open)
    return 0


def view(args: argparse.Namespace) -> int:
    """Run `embodyrl view`: show the dashboard of a run in the terminal."""
    if len(args.arguments) > 1:
        raise ConfigError("embodyrl view takes one run, for example: embodyrl view runs/my_run.")
    run = find_run(args.arguments[0]) if args.arguments else find_newest_run("embodyrl view")
    from rich.console import Console
    from rich.live import Live

    if not args.follow:
        Console().print(build_dashboard(read_history(run)))
        return 0
    with Live(build_dashboard(read_history(run)), auto_refresh=False) as live:
        while is_running(run):
            time.sleep(1.0)
            live.update(build_dashboard(read_history(run)), refresh=True)
    return 0


def build_dashboard(history: History) -> RenderableType:
    """Return the dashboard of a training run, or the table of an evaluation, as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    evaluation = history.evaluations[-1] if history.evaluations else history.unfinished
    if not (history.rows or evaluation):
        return Text(f"{clean_text(history.name)}: no metrics yet; embodyrl view --follow waits for the first metrics.")
    if reply_lines := list(format_samples(select_samples(history, _MAX_REPLIES))):
        return Group(_build_score_table(history, evaluation), Text("\n".join(["replies", *reply_lines])))
    return _build_score_table(history, evaluation)


def _build_score_table(history: History, evaluation: Evaluation | None) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from embodyrl.monitor.dashboard import replay_metrics
    from embodyrl.monitor.protocol import RunInfo

    if evaluation is not None and not history.rows:
        has_success = any(row.success_once is not None for row in evaluation.episodes)
        suffix = ": unfinished, episodes so far" * (evaluation is history.unfinished)
        title = Text(clean_text(history.name) + suffix, style="table.title")
        table = Table("task", f"{'success' if has_success else 'return'}, 95 % interval", title=title)
        scores = [(task or "all tasks", evaluation.score(task)) for task in [*evaluation.tasks, None]]
        scores += [(f"suite {suite}", score) for suite, score in evaluation.suites.items()]
        for name, score in scores:
            table.add_row(Text(clean_text(name)), str(score))  # rich would interpret [tags] in a str
        return table
    names = {row.task_id: row.task for row in (evaluation.episodes if evaluation else ())}
    tasks = tuple(names.get(task_id, "") for task_id in range(max(names, default=-1) + 1))
    total = history.values.get("runner.max_steps")
    if not isinstance(total, int):
        raise ConfigError(f"{history.folder / 'config.yaml'}: runner.max_steps is not a number. Restore the file.")
    events = (clean_text(line[11:]) for line in history.text(EVENTS_FILE).splitlines())
    return replay_metrics(RunInfo(run_id=history.name, total_steps=total, tasks=tasks), history.rows, events)
