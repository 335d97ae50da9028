"""The command `view`: look at a run in the terminal, while it runs or afterwards."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from embodyrl.cli.runs import find_run, is_running
from embodyrl.errors import ConfigError
from embodyrl.monitor.history import EVENTS_FILE, History, read_history

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    from embodyrl.monitor.report.tables import rate_of

    episodes = [e for evaluation in history.evaluations for e in evaluation.episodes]
    names = {e.task_id: e.task for e in episodes}
    if not history.rows:
        table = Table("task", "success, 95 % interval", title=history.name)
        for task in [*dict.fromkeys(names.values()), None]:
            table.add_row(task or "all tasks", str(rate_of(episodes, task)))
        return table
    tasks = tuple(names.get(k, "") for k in range(max(names, default=-1) + 1))
    total = int(history.config["runner"]["max_steps"])
    events = (line[11:] for line in history.text(EVENTS_FILE).splitlines())
    return replay(RunInfo(run_id=history.name, total_steps=total, tasks=tasks), history.rows, events)
