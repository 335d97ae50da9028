"""`-m`: several runs from one command line, one after the other, each in a process of its own."""

import shlex
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
from embodyrl.plan.config import config_of_ckpt, load_config

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
    """Check every combination, then run all; 1 if one of them failed, 130 after Ctrl-C.

    Raises:
        ConfigError: a combination is wrong; nothing was started.
    """
    jobs = expand(words)
    configs = [load_config(command, job, config_dirs=config_dirs, base=config_of_ckpt(job)) for job in jobs]
    places = [Path(cfg.runner.output_dir) for cfg in configs]
    flags = [part for folder in config_dirs for part in ("--config-dir", str(folder))]
    codes: list[int | None] = [None] * len(jobs)
    found: list[dict[str, Any]] = [{} for _ in jobs]
    stopped = False
    for number, (job, place) in enumerate(zip(jobs, places, strict=True)):
        before = _written(place)
        print(f"[{number + 1}/{len(jobs)}] embodyrl {command} {shlex.join(job)}", flush=True)
        codes[number], stopped = _run([sys.executable, "-m", "embodyrl.cli.main", command, *job, *flags])
        # Also one that `runner.on_existing=resume` went on with.
        found[number] = next((describe_run(run) for run, _ in _written(place).items() - before.items()), {})
        if stopped:
            break
    _print_table(jobs, codes, found)
    if stopped and any(word.startswith(_NAME) for word in words):
        print("go on  with the same words and runner.on_existing=resume")
    if paths := [run["path"] for run in found if run]:
        print(f"next  embodyrl report {shlex.join(paths)} --open")
    return 130 if stopped else int(any(codes))


def _written(place: Path) -> dict[Path, int]:
    """Runs of a folder, and when each was last begun."""
    return {run: (run / "config.yaml").stat().st_mtime_ns for run in run_folders(place)}


def _run(words: Sequence[str]) -> tuple[int, bool]:
    """Run a command to its end; its exit code, and whether Ctrl-C came.

    That reaches the run as well, which saves and says how to go on: it is waited for.
    """
    stopped, process = False, subprocess.Popen(words)
    while True:
        try:
            return process.wait(), stopped
        except KeyboardInterrupt:
            stopped = True


def _print_table(jobs: Sequence[Sequence[str]], codes: Sequence[int | None], runs: Sequence[Mapping[str, Any]]) -> None:
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
                "not started" if code is None else "ok" if code == 0 else f"exit {code}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
