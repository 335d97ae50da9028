"""The command `report`: what a run did, as one HTML page."""

from __future__ import annotations

import argparse

from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_run
from embodyrl.errors import ConfigError


def report(args: argparse.Namespace) -> int:
    """Run `embodyrl report`."""
    from embodyrl.monitor.report import write_report

    runs = [find_run(word) for word in args.words]
    if not runs:
        raise ConfigError("embodyrl report takes a run folder: embodyrl report runs/my_run; two or more are compared.")
    name = "report.html" if len(runs) == 1 else f"report_vs_{'_'.join(run.name for run in runs[1:])}.html"
    out = args.out or runs[0] / name
    try:
        lines = write_report(runs, out)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}. Choose another place with --out FILE.") from error
    show_result(args, {"page": out, "summary": lines}, (*lines, f"page  {out}"))
    if args.open:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
    return 0
