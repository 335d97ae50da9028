"""The command `bench`, which runs a benchmark of a source checkout."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import embodyrl
from embodyrl.errors import ConfigError
from embodyrl.registry import closest


def bench(args: argparse.Namespace) -> NoReturn:
    """Run `embodyrl bench NAME`, which replaces this process with the benchmark."""
    folder = Path(embodyrl.__file__).parents[1] / "benchmarks"
    benchmarks = {file.stem: file for file in sorted(folder.glob("[a-z]*.py"))}
    if not benchmarks:
        raise ConfigError(
            f"{folder} contains no benchmarks, because the installed package has none. Use a source checkout."
        )
    if not args.arguments or args.arguments[0] not in benchmarks:
        hint = f" '{args.arguments[0]}' is unknown.{closest(args.arguments[0], benchmarks)}" if args.arguments else ""
        raise ConfigError(f"embodyrl bench needs the name of a benchmark.{hint} Benchmarks: {', '.join(benchmarks)}.")
    sys.stdout.flush()
    # Replaces this process, so that its signals reach the benchmark.
    os.execv(sys.executable, [sys.executable, str(benchmarks[args.arguments[0]]), *args.arguments[1:]])
