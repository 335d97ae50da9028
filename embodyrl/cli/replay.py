"""The command `replay`: what an update was given, computed again; the place to look when numbers are wrong."""

from __future__ import annotations

import argparse
import math

from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_run
from embodyrl.errors import CheckFailedError, ConfigError

_SHOWN = 20
"""Lines of the table; --json has all."""


def replay(args: argparse.Namespace) -> int:
    """Run `embodyrl replay`."""
    if len(args.words) != 1 or not (args.step or "1").isdecimal():
        raise ConfigError("embodyrl replay takes one run and a step: embodyrl replay runs/my_run --step 51.")
    run = find_run(args.words[0])
    from embodyrl.runtime.dump import dumped_steps
    from embodyrl.runtime.replay import gap
    from embodyrl.runtime.replay import replay as compute

    step = int(args.step or max(dumped_steps(run), default=1))
    result = compute(run, step)
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
