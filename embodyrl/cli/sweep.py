"""Sweeps with the flag `-m` (multirun): runs one after the other, each in a separate process."""

import itertools
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from embodyrl.cli.discover.runs import describe_run
from embodyrl.cli.runs import run_folders
from embodyrl.config.compose import dir_flags
from embodyrl.config.trust import format_shell_command
from embodyrl.errors import PARENT_EXITED, ConfigError
from embodyrl.files import has_room
from embodyrl.plan.config import load_with_ckpt
from embodyrl.plan.schema import Config
from embodyrl.process_cleanup import install_signal_handlers, signal_at_parents_end

_NAME = "runner.experiment_name="
_MAX_WAIT_S = 1.0
"""Maximum duration of a blocking wait, in seconds. A signal that arrives just before a wait is handled after at most
this time."""


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each run: all combinations of `key=a,b`, `key=range(0,3)`, `key=choice(a,b)`.

    >>> expand(["seed=0,1", "env=tabletop"])
    [['seed=0', 'env=tabletop'], ['seed=1', 'env=tabletop']]

    Raises:
        ConfigError: an argument cannot be parsed.
    """
    try:
        choices = [
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [str(override.input_line)]
            for override in OverridesParser.create().parse_overrides(list(arguments))
        ]
        jobs = [list(job) for job in itertools.product(*choices)]
    except (HydraException, ValueError):  # invalid syntax, or a range without an end
        jobs = []
    if not jobs:
        raise ConfigError(f"Cannot sweep '{' '.join(arguments)}'. With -m, write key=a,b or key=range(0,3).")
    for index, job in enumerate(jobs):
        # Runs with the same name would share a folder.
        job[:] = [
            f"{override}-{index}" if override.startswith(_NAME) and len(jobs) > 1 else override for override in job
        ]
    return jobs


def sweep(command: str, arguments: Sequence[str], config_dirs: Sequence[Path]) -> int:
    """Check and run all combinations; return 1 if a run failed, and 128 + n after signal n.

    A signal is forwarded to the current run, which saves a checkpoint and prints the resume command.

    Raises:
        ConfigError: a combination is invalid; no run was started.
    """
    jobs = expand(arguments)
    configs = [load_with_ckpt(command, job, config_dirs=config_dirs) for job in jobs]
    _check_components(configs)
    flags = dir_flags(config_dirs)
    codes: list[int | None] = [None] * len(jobs)
    results: list[dict[str, Any]] = [{} for _ in jobs]
    running = _SweepProcess()
    with install_signal_handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), running.forward_signal)):
        for index, (job, cfg) in enumerate(zip(jobs, configs, strict=True)):
            output_folder = Path(cfg.runner.output_dir)
            earlier = _get_config_times(output_folder)
            command_line = format_shell_command([command, *job, *flags], cfg)
            print(f"[{index + 1}/{len(jobs)}] {command_line}", flush=True)
            codes[index] = running.run([sys.executable, "-m", "embodyrl.cli.main", command, *job, *flags])
            # This includes a run that `runner.on_existing=resume` resumed.
            results[index] = next(
                (describe_run(run) for run, _ in _get_config_times(output_folder).items() - earlier.items()), {}
            )
            if running.stopped:
                break
        if has_room(sys.stdout, 1.0):  # else the output has no reader, for example after the terminal was closed
            _print_table(jobs, codes, results)
            if running.stopped and any(argument.startswith(_NAME) for argument in arguments):
                print("resume  with the same arguments and runner.on_existing=resume")
            if paths := [run["path"] for run in results if run]:
                print(f"next  embodyrl report {shlex.join(paths)} --open")
    return 128 + running.stopped if running.stopped else int(any(codes))


def _check_components(configs: Sequence[Config]) -> None:
    """Raise an error if a config has incompatible components."""
    # Imported here, so that an unknown key is reported without the slow imports of the run plan.
    from embodyrl.plan.build import build_run_plan
    from embodyrl.plan.checks import check_components

    for cfg in configs:
        check_components(cfg)
        build_run_plan(cfg, training=not cfg.runner.only_eval)


def _get_config_times(folder: Path) -> dict[Path, int]:
    """Return the modification time of the config of each run in a folder, by run folder."""
    return {run: (run / "config.yaml").stat().st_mtime_ns for run in run_folders(folder)}


class _SweepProcess:
    """Process of the current run, and the signal that stopped the sweep, if any."""

    def __init__(self) -> None:
        self.stopped = 0
        self._process: subprocess.Popen[bytes] | None = None

    def forward_signal(self, signum: int, frame: object) -> None:
        """Forward a signal to the current run; signal handler of the sweep."""
        # The run itself may also have received the first signal from the terminal or batch system.
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM if self.stopped else PARENT_EXITED)
        self.stopped = self.stopped or (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def run(self, command: Sequence[str]) -> int:
        """Run a command until it exits; return its exit code."""
        self._process = subprocess.Popen(command, preexec_fn=partial(signal_at_parents_end, PARENT_EXITED))
        if self.stopped:  # a signal arrived just before the process started
            self._process.send_signal(PARENT_EXITED)
        while True:
            try:  # a signal that arrives just before a wait does not interrupt it
                return self._process.wait(_MAX_WAIT_S)
            except subprocess.TimeoutExpired:
                continue


def _print_table(jobs: Sequence[Sequence[str]], codes: Sequence[int | None], runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with the differing settings and the result of each run."""
    common = set(jobs[0]).intersection(*jobs)
    table = [("run", "settings", "step", "success", "return", "")]
    for job, code, run in zip(jobs, codes, runs, strict=True):
        success, mean_return = run.get("success"), run.get("return")
        table.append(
            (
                str(run.get("id", "-")),
                " ".join(argument for argument in job if argument not in common and not argument.startswith(_NAME)),
                str(run.get("step") or "-"),
                "-" if success is None else f"{100 * success:.1f} %",
                "-" if mean_return is None else f"{mean_return:.4g}",
                "not started" if code is None else "ok" if code == 0 else f"exit {code}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
