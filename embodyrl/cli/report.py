"""The commands `report`, `view` and `replay`: what a run did, as a page, in the terminal, or computed again."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING

from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_run, is_running
from embodyrl.config.trust import TRUST
from embodyrl.errors import CheckFailedError, ConfigError
from embodyrl.monitor.history import EVENTS_FILE, History, read_history, score_of

if TYPE_CHECKING:
    from rich.console import RenderableType
_SHOWN = 20
"""Lines of the table; --json has all."""


def report(args: argparse.Namespace) -> int:
    """Run `embodyrl report`."""
    from embodyrl.monitor.report.page import write_report
    from embodyrl.plan.roots import all_keys

    runs = [find_run(word) for word in args.words]
    if not runs:
        raise ConfigError("embodyrl report takes a run folder: embodyrl report runs/my_run; two or more are compared.")
    name = "report.html" if len(runs) == 1 else f"report_vs_{'_'.join(run.name for run in runs[1:])}.html"
    out = args.out or runs[0] / name
    try:
        defaults = {name: key.default for name, key in all_keys().items() if not key.required}
        lines = write_report(runs, out, defaults=defaults)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}. Choose another place with --out FILE.") from error
    show_result(args, {"page": out, "summary": lines}, (*lines, f"page  {out}"))
    if args.open:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
    return 0


def card(args: argparse.Namespace) -> int:
    """Run `embodyrl card`."""
    from embodyrl.monitor.card import card_of, card_text, write_card

    if len(args.words) != 1:
        raise ConfigError("embodyrl card takes one run: embodyrl card runs/my_run.")
    run = find_run(args.words[0])
    try:
        paths = write_card(run, args.out)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {args.out or run}: {error.strerror}. Choose another place with --out."
        ) from error
    found = card_of(run)
    show_result(args, found, (card_text(found), *(f"card  {path}" for path in paths)))
    return 0


def view(args: argparse.Namespace) -> int:
    """Run `embodyrl view`."""
    if len(args.words) != 1:
        raise ConfigError("embodyrl view takes one run: embodyrl view runs/my_run.")
    run = find_run(args.words[0])
    from rich.console import Console
    from rich.live import Live

    if not args.follow:
        Console().print(picture(read_history(run)))
        return 0
    with Live(picture(read_history(run)), auto_refresh=False) as live:
        while is_running(run):
            time.sleep(1.0)
            live.update(picture(read_history(run)), refresh=True)
    return 0


def picture(history: History) -> RenderableType:
    """The dashboard of a training, the table of an evaluation."""
    from rich.table import Table

    from embodyrl.monitor.dashboard import replay
    from embodyrl.monitor.protocol import RunInfo

    episodes = [e for evaluation in history.evaluations for e in evaluation.episodes]
    names = {e.task_id: e.task for e in episodes}
    if not history.rows:
        known = any(e.success_once is not None for e in episodes)
        table = Table("task", f"{'success' if known else 'return'}, 95 % interval", title=history.name)
        for task in [*dict.fromkeys(names.values()), None]:
            table.add_row(task or "all tasks", str(score_of([e for e in episodes if task in (None, e.task)])))
        return table
    tasks = tuple(names.get(k, "") for k in range(max(names, default=-1) + 1))
    total = int(history.config["runner"]["max_steps"])
    events = (line[11:] for line in history.text(EVENTS_FILE).splitlines())
    return replay(RunInfo(run_id=history.name, total_steps=total, tasks=tasks), history.rows, events)


def replay(args: argparse.Namespace) -> int:
    """Run `embodyrl replay`."""
    trust = [word for word in args.words if word == TRUST]
    args.words = [word for word in args.words if word != TRUST]
    if len(args.words) != 1 or not (args.step or "1").isdecimal():
        raise ConfigError("embodyrl replay takes one run and a step: embodyrl replay runs/my_run --step 51.")
    run = find_run(args.words[0])
    from embodyrl.commands.dump import dumped_steps
    from embodyrl.commands.replay import gap
    from embodyrl.commands.replay import replay as compute

    step = int(args.step or max(dumped_steps(run), default=1))
    result = compute(run, step, overrides=trust)
    columns = {
        "episode": result.episode,
        "chunk": result.chunk,
        "reset_id": result.reset_id,
        "version": result.version,
        "reward": result.reward,
        "advantage": result.advantage[0].mean(axis=1),
        "replayed": result.advantage[1].mean(axis=1),
        "gap": gap(result.advantage),
        "logprob": result.logprob[0].sum(axis=1),
        "logprob_replayed": result.logprob[1].sum(axis=1),
        "logprob_gap": gap(result.logprob),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    worst = sorted(rows, key=_most_different)[:_SHOWN]
    lines = (
        f"step {step} of {run}, weights {result.weights}",
        "".join(f"{name:>17}" for name in columns),
        *("".join(f"{value:>17.6g}" for value in row.values()) for row in worst),
        f"above: the {len(worst)} of {len(rows)} chunks that differ most; {int(result.stale.sum())} are stale",
        *(f"  {name:<20} {a:>14.6g} {b:>14.6g}   {b - a:+.2e}" for name, (a, b) in result.metrics.items()),
    )
    # JSON has no word for what is not a number.
    chunks = [{name: value if math.isfinite(value) else None for name, value in row.items()} for row in rows]
    show_result(args, {"step": step, "chunks": chunks, "metrics": result.metrics, "problems": result.problems}, lines)
    if result.problems:
        raise CheckFailedError("; ".join(result.problems) + ".")
    return 0


def _most_different(row: dict[str, float]) -> float:
    """Sort key: what is not a number, a chunk that is left out now, comes first."""
    gaps = (row["gap"], row["logprob_gap"])
    return -math.inf if any(map(math.isnan, gaps)) else -max(gaps)
