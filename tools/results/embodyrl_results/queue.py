"""Queue that runs recipes and their preparations one by one, and resumes after an interruption."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from embodyrl.cli.commands import COMMANDS
from embodyrl.errors import PARENT_EXITED, EmbodyError
from embodyrl.monitor.history import METRICS_FILE, read_newest_values, read_rows
from embodyrl.process_cleanup import signal_at_parents_end
from embodyrl.reports.card import CARD_JSON, write_card
from embodyrl_results.table import Recipe, read_card

QUEUE_FILE = "queue.jsonl"
"""Log with one row per executed command: run, arguments, exit code, wall-clock seconds."""
_RUNNERS = frozenset(name for name, one in COMMANDS.items() if one.target == COMMANDS["train"].target)
"""Commands with the keys of runs."""
OUTDATED = "has a card of another command than the recipe's"
_AGAIN = "remove the folder to run the recipe again"
_POLL_S, _STOP_S = 1.0, 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """Training run of one recipe with one seed."""

    recipe: Recipe
    seed: int
    out: Path

    @property
    def run(self) -> Path:
        """Folder of the training run."""
        return self.out / self.recipe.run_name(self.seed)

    @property
    def done(self) -> bool:
        """True if the run has a result card, the last file that a run writes."""
        return (self.run / CARD_JSON).is_file()

    @property
    def outdated(self) -> bool:
        """True if the result card is of another command than the recipe's, for example of an earlier version."""
        if not self.done:
            return False
        card_arguments = shlex.split(read_card(self.run / CARD_JSON)["command"].partition(" && ")[0])
        card_arguments = card_arguments[card_arguments.index("embodyrl") + 2 :]
        _, *recipe_arguments = shlex.split(
            self.recipe.command
        )  # the first word of the card may be eval (runner.only_eval)
        required = {argument for argument in recipe_arguments if "{out}" not in argument and "{seed}" not in argument}
        return len(card_arguments) + 1 != len(self.steps()[-1][1]) or not required <= {*card_arguments}

    def steps(self) -> list[tuple[Path, list[str]]]:
        """Return the log path (without suffix) and the arguments of each command, first preparation, then training.

        The arguments start a run, or resume an interrupted run from its newest checkpoint. `data filter` has no run
        folder.
        """
        folder_overrides = [f"runner.output_dir={self.out}", f"runner.experiment_name={self.run.name}"]
        steps = self.recipe.preparations(self.seed, self.out)
        steps.append((self.run.name, [*self.recipe.arguments(self.seed, self.out), *folder_overrides]))
        return [
            (self.out / name, [*arguments, "runner.on_existing=resume"] if arguments[0] in _RUNNERS else arguments)
            for name, arguments in steps
        ]


def list_jobs(recipes: Sequence[Recipe], out: Path) -> list[Job]:
    """Return one job for each recipe and seed."""
    return [Job(recipe, seed, out) for recipe in recipes for seed in recipe.seeds]


def run_queue(jobs: Sequence[Job], console: Console) -> list[Job]:
    """Run all jobs without a result card and show their progress; return the failed jobs.

    Raises:
        EmbodyError: a folder is not writable.
    """
    failed: list[Job] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=1) as bar:
        task = bar.add_task("", total=len(jobs), completed=sum(job.done for job in jobs))
        for job in jobs:
            if job.done:
                bar.console.print(f"{job.run}: {OUTDATED if job.outdated else 'has a card'}; {_AGAIN}")
                failed += [job] * job.outdated
                continue
            job.out.mkdir(parents=True, exist_ok=True)
            run = job.run
            for run, step in _run_job(job):
                bar.update(task, description=run.name + (f", step {step}" if step is not None else ""))
            if job.done:
                bar.advance(task)
                bar.console.print(f"{job.run}: done")
            else:
                failed.append(job)
                bar.console.print(f"{job.run}: failed; the last lines of {run}.log name the cause")
    return failed


def _run_job(job: Job) -> Iterator[tuple[Path, int | None]]:
    """Run a job and write its result card; yield the run folder and training step about once a second.

    Preparations that the queue lists as finished with the same arguments are skipped.
    """
    try:
        rows = read_rows(job.out / QUEUE_FILE)
        finished = [(row.get("run"), row.get("arguments")) for row in rows if row.get("exit") == 0]
        for run, arguments in job.steps():
            if run != job.run and (run.name, shlex.join(arguments)) in finished:
                continue
            if (yield from _run_command(run, arguments)):
                return
        write_card(job.run)
    except OSError as error:
        raise EmbodyError(f"Cannot write to {job.out}: {error.strerror}. Choose another folder with --out.") from error


def _run_command(run: Path, arguments: Sequence[str]) -> Generator[tuple[Path, int | None], None, int]:
    """Run one command, append a row to the log, and return the exit code."""
    yield run, None
    started = time.time()
    with open(f"{run}.log", "ab") as log, _start_process(arguments, log.fileno()) as process:
        while process.poll() is None:
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                yield run, read_newest_values(run / METRICS_FILE, ("step",))[0]
    row = {"run": run.name, "arguments": shlex.join(arguments), "exit": process.returncode}
    row["wall_s"] = round(time.time() - started, 1)
    with open(run.parent / QUEUE_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return process.returncode


@contextmanager
def _start_process(arguments: Sequence[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process of a run; a process still running at the end of the block saves a checkpoint and stops."""
    # Without a terminal signal of its own: this process forwards the interruption once.
    process = subprocess.Popen(
        [sys.executable, "-m", "embodyrl.cli.main", *arguments],
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(signal_at_parents_end, PARENT_EXITED),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(PARENT_EXITED)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)
