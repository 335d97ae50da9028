"""The command `replay`: what an update was given, computed again; the place to look when numbers are wrong."""

from __future__ import annotations

import argparse
import json

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
    if args.json:
        print(json.dumps({"step": step, "chunks": rows, "metrics": result.metrics, "problems": result.problems}))
    else:
        print(f"step {step} of {run}, weights {result.weights}")
        print("".join(f"{name:>17}" for name in columns))
        rows.sort(key=lambda row: max(row["gap"], row["logprob_gap"]), reverse=True)
        for row in rows[:_SHOWN]:
            print("".join(f"{value:>17.6g}" for value in row.values()))
        print(f"above: the {_SHOWN} of {len(rows)} chunks that differ most; {int(result.stale.sum())} are stale")
        for name, (then, now) in result.metrics.items():
            print(f"  {name:<20} {then:>14.6g} {now:>14.6g}   {now - then:+.2e}")
    if result.problems:
        raise CheckFailedError("; ".join(result.problems) + ".")
    return 0
