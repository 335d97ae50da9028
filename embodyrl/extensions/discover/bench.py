"""The command `bench`: run one of the benchmarks of a source checkout."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import embodyrl
from embodyrl.errors import ConfigError
from embodyrl.registry import closest


def bench(args: argparse.Namespace) -> NoReturn:
    """Run `embodyrl bench NAME [its flags]`; the exit code is the benchmark's."""
    folder = Path(embodyrl.__file__).parents[1] / "benchmarks"
    found = {file.stem: file for file in sorted(folder.glob("[a-z]*.py"))}
    if not found:
        raise ConfigError(
            f"{folder} contains no benchmarks. The installed package has no benchmarks; use a source checkout."
        )
    if not args.words or args.words[0] not in found:
        hint = closest(args.words[0], found) if args.words else ""
        raise ConfigError(
            f"embodyrl bench needs a benchmark name.{hint} One of: {', '.join(found)}. --json OUT writes the results."
        )
    sys.stdout.flush()
    # In place of this process, so that a signal to it is one to the benchmark.
    os.execv(sys.executable, [sys.executable, str(found[args.words[0]]), *args.words[1:]])
