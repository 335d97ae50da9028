"""The command `bench`, which runs a benchmark of a source checkout."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import embodyrl
from embodyrl.cli.arguments import choose_name
from embodyrl.errors import ConfigError


def bench(args: argparse.Namespace) -> NoReturn:
    """Run `embodyrl bench NAME`, which replaces this process with the benchmark."""
    folder = Path(embodyrl.__file__).parents[1] / "benchmarks"
    benchmarks = {file.stem: file for file in sorted(folder.glob("[a-z]*.py"))}
    if not benchmarks:
        raise ConfigError(
            f"{folder} contains no benchmarks, because the installed package has none. Use a source checkout."
        )
    name = choose_name(args.arguments, benchmarks, "embodyrl bench needs the name of a benchmark")
    sys.stdout.flush()
    # Replaces this process, so that its signals reach the benchmark.
    os.execv(sys.executable, [sys.executable, str(benchmarks[name]), *args.arguments[1:]])
