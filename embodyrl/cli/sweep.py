"""`-m`: several runs from one command line, one after the other, each in a process of its own."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from embodyrl.cli.runs import describe_run, run_folders
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config

_NAME = "runner.experiment_name="


def expand(words: Sequence[str]) -> list[list[str]]:
    """Return the command line of each run: every combination of `key=a,b`, `key=range(0,3)`, `key=choice(a,b)`.

    >>> expand(["seed=0,1", "env=tabletop"])
    [['seed=0', 'env=tabletop'], ['seed=1', 'env=tabletop']]

    Raises:
        ConfigError: a word that cannot be parsed.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
        jobs = [job for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch]
    except (HydraException, ValueError):  # no such syntax; a range without end
        jobs = []
    if not jobs:
        raise ConfigError(f"Cannot sweep '{' '.join(words)}'. With -m, write key=a,b or key=range(0,3).")
    for number, job in enumerate(jobs):
        # Runs of one name would meet in one folder.
        job[:] = [f"{word}-{number}" if word.startswith(_NAME) and len(jobs) > 1 else word for word in job]
    return [list(job) for job in jobs]


def sweep(command: str, words: Sequence[str], config_dirs: Sequence[Path]) -> int:
    """Check every combination, then run all; 1 if one of them failed.

    Raises:
        ConfigError: a combination is wrong; nothing was started.
    """
    jobs = expand(words)
    places = [Path(load_config(command, job, config_dirs=config_dirs).runner.output_dir) for job in jobs]
    flags = [part for folder in config_dirs for part in ("--config-dir", str(folder))]
    codes, found = [], []
    for number, (job, place) in enumerate(zip(jobs, places, strict=True), 1):
        before = run_folders(place)
        print(f"[{number}/{len(jobs)}] embodyrl {command} {' '.join(job)}", flush=True)
        done = subprocess.run([sys.executable, "-m", "embodyrl.cli.main", command, *job, *flags], check=False)
        codes.append(done.returncode)
        found.append(next((describe_run(run) for run in run_folders(place) if run not in before), {}))
    _print_table(jobs, codes, found)
    if paths := [run["path"] for run in found if run]:
        print(f"next  embodyrl report {' '.join(paths)} --open")
    return 1 if any(codes) else 0


def _print_table(jobs: Sequence[Sequence[str]], codes: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> None:
    """What differs between the runs, and how each ended."""
    same = set(jobs[0]).intersection(*jobs)
    table = [("run", "settings", "step", "success", "return", "")]
    for job, code, run in zip(jobs, codes, runs, strict=True):
        success, earned = run.get("success"), run.get("return")
        table.append(
            (
                str(run.get("id", "-")),
                " ".join(word for word in job if word not in same and not word.startswith(_NAME)),
                str(run.get("step") or "-"),
                "-" if success is None else f"{100 * success:.1f} %",
                "-" if earned is None else f"{earned:.4g}",
                "ok" if code == 0 else f"exit {code}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
