"""Chaos test: random signals to random processes of all kinds of runs, with invariants that must hold.

    PYTHONPATH=tests:. python tests/faults/chaos.py --minutes 30 --folder chaos

A trial starts a run, sends a few signals at random moments, resumes the run after each end, and finally lets it
finish. After each end: the exit code fits the signals, no traceback, every death is reported by name, no process,
shared memory or temporary file remains, rows of metrics are unique and ordered, checkpoints match their manifests.
A deterministic run ends with the rows and weights of an undisturbed run. Everything but the arrival times of signals
follows from the seed. With the same --folder a later call continues with
the next kind of run, and its tables cover all calls. With --phases, each signal is KILL, TERM or INT in a random phase
of a training run:

    PYTHONPATH=tests:. python tests/faults/chaos.py --phases --kinds cartpole,tabletop --injections 60 --quota 4 8

With --fork, runs use launcher=inline and are forks of this process, which has loaded all modules, so they start fast.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from chaos_kinds import STEPS, Kind, kinds, write_programs
from chaos_processes import has_handler, process_tree, role_of
from processes import (
    MARK,
    Command,
    command_environment,
    heed_signals,
    marked_processes,
    start_cli,
    wait_until,
)

from embodyrl.cli.main import main as main_of_embodyrl
from embodyrl.monitor.history import read_rows

LOG = "trials.jsonl"
"""File with the events of each trial in a folder."""

LIMIT_S = 240.0
"""Maximum duration in seconds; longer runs count as hung."""
KILL, TERM, INT, HUP, USR1, STOP = (getattr(signal, f"SIG{n}") for n in ("KILL", "TERM", "INT", "HUP", "USR1", "STOP"))
SIGNALS = {
    "driver": (KILL, TERM, INT, HUP, USR1, STOP),
    "group": (KILL, TERM, INT, HUP, STOP),
    "env": (KILL, KILL, TERM, INT, HUP, USR1, STOP),
    "policy": (KILL, TERM, INT, HUP, USR1, STOP),
    "rollout": (KILL, TERM, INT, HUP, USR1, STOP),
    "young": (KILL, TERM, STOP),
    "reward": (KILL, TERM, INT, HUP, USR1, STOP),
    "program": (KILL, TERM, STOP),
    "judge": (KILL, STOP),
}
"""Signals for each kind of process; STOP is followed by CONT."""
PHASES = ("start", "rollout", "validation", "saving", "last evaluation")
"""Phases in which `--phases` sends signals; the start of a later attempt counts as "resume"."""


def phase_of(run: Path, begun: float) -> str:
    """Return the phase of a training run whose process started at the wall-clock time `begun`."""

    def is_new(path: Path) -> bool:
        try:
            return path.stat().st_mtime >= begun
        except FileNotFoundError:
            return False

    if any(map(is_new, (run / "checkpoints").glob(".tmp-*"))):
        return "saving"
    for folder in run.glob("eval/step_*"):
        if is_new(folder / "episodes.jsonl") and not (folder / "eval.json").exists():
            return "last evaluation" if folder.name == f"step_{STEPS:06d}" else "validation"
    if is_new(run / "eval" / f"step_{STEPS:06d}" / "eval.json"):
        return "end"
    return "rollout" if is_new(run / "metrics.jsonl") else "start"


@dataclass
class Injection:
    """A signal that was sent, and its possible effects."""

    role: str
    name: str
    signum: int
    at: float
    handled: bool
    """True if the process had installed its handlers (or ignored the signal)."""
    early: bool
    """True if no run had started in the process."""
    codes: set[int] = field(default_factory=set)
    """Exit codes that the signal may cause."""
    phase: str = ""
    """Phase of the run, with `--phases`."""

    @property
    def fatal(self) -> bool:
        return self.signum == KILL or (self.signum != STOP and not self.handled)


class Fork:
    """A command in a fork of this process, with the interface of `subprocess.Popen` that `Command` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG)) != (0, 0):
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Wait for the exit code."""
        assert wait_until(lambda: self.poll() is not None, timeout_s), "it hangs"
        return self.poll() or 0


def fork_cli(*args: str, cwd: Path) -> Command:
    """Start `embodyrl ARGS` in a fork of this process, with its own process group; its output goes to files."""
    for module in ("commands.train", "workers.policy_host", "workers.env_worker", "policies.actor_critic.policy"):
        importlib.import_module(f"embodyrl.{module}")
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()  # a child waits forever for the timer thread of pytest's time limit
    pid = os.fork()
    if pid == 0:
        code = 130
        try:
            os.setsid()
            heed_signals()
            signal.signal(INT, signal.default_int_handler)  # as in a new interpreter
            os.chdir(cwd)
            os.environ.update(command_environment(cwd))
            tempfile.tempdir = None
            for number, target in enumerate((Path(os.devnull), out, err)):
                os.dup2(os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            code = main_of_embodyrl(args)
        finally:
            os._exit(code)
    return Command(cast("subprocess.Popen[bytes]", Fork(pid)), out, err)


class Judge:
    """The reward service process, which is restarted after its death."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/"
        self._process: subprocess.Popen[bytes] | None = None

    def pid(self) -> int:
        """Return the process id; start the process if it does not run."""
        if self._process is None or self._process.poll() is not None:
            code = Path(__file__).with_name("chaos_judge.py")
            environ = {k: v for k, v in os.environ.items() if k != MARK}
            self._process = subprocess.Popen([sys.executable, str(code), str(self._port)], env=environ)
            assert wait_until(self._listens, 30)
        return self._process.pid

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Trial:
    """One run from its first start to its end."""

    def __init__(
        self, kind: Kind, folder: Path, rng: random.Random, judge: Judge, typical_s: float, chaos: Chaos
    ) -> None:
        self.kind, self.folder, self._rng, self._judge = kind, folder, rng, judge
        self._typical_s, self._phases, self._start = typical_s, chaos.phases, chaos.start
        self.injections: list[Injection] = []
        self.codes: list[int] = []
        self._on_ray = kind.name == "ray"

    def run(self, quota: int) -> None:
        """Start, disturb `quota` times, resume, finish.

        Raises:
            AssertionError: an invariant is violated.
        """
        for _ in range(quota + 4):
            left = quota - len(self.injections)
            begun = len(self.injections)
            self._judge.pid()  # starts the service again after its death
            command = self._start(*self._words(), cwd=self.folder)
            try:
                if left:
                    self._disturb(command, left)
                assert wait_until(lambda c=command: c.process.poll() is not None, LIMIT_S), "it hangs"
            finally:
                command.stop()
            code = command.wait()
            self.codes.append(code)
            self._check(command, code, self.injections[begun:])
            if code == 0:
                break
        assert code == 0, f"exit code {code} after {len(self.codes)} attempts:\n{command.printed}"
        self.kind.check(self.folder, complete=True)

    def _words(self) -> list[str]:
        run = self.folder / "run"
        if run.exists() and not (run / "config.yaml").is_file():
            for path in sorted(run.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            run.rmdir()  # killed in the moment of its birth: nothing is there to go on from
        return self.kind.start(self.folder)

    def _disturb(self, command: Command, left: int) -> None:
        if self._phases:
            self._disturb_phases(command, left)
            return
        due = time.monotonic() + self._rng.uniform(0.0, self._typical_s)
        while left and command.process.poll() is None:
            time.sleep(0.01)
            if time.monotonic() < due:
                continue
            injection = self._inject(command)
            due = time.monotonic() + self._rng.uniform(0.0, min(3.0, self._typical_s / 8))
            if injection is not None:
                self.injections.append(injection)
                left -= 1

    def _disturb_phases(self, command: Command, left: int) -> None:
        """Send signals in random phases, each shortly after the phase begins, until the process ends."""
        run, begun = self.folder / "run", time.time()
        while left:
            phase = self._rng.choice(PHASES if self.injections else PHASES[:2])
            delay_s = self._rng.uniform(0.0, self._typical_s / 2 if phase == "start" else 0.2)
            while command.process.poll() is None and phase_of(run, begun) != phase:
                time.sleep(0.001)
            time.sleep(delay_s)
            if command.process.poll() is not None:
                return
            injection = self._inject(command)
            if injection is not None:
                injection.phase = "resume" if self.codes and phase == "start" else phase
                self.injections.append(injection)
                left -= 1

    def _inject(self, command: Command) -> Injection | None:
        victims: dict[str, list[tuple[int, str]]] = {
            "driver": [(command.pid, "driver")],
            "group": [(command.pid, "group")],
        }
        for pid in process_tree(command.pid):
            if pid != command.pid and (found := role_of(pid)):
                victims.setdefault(found[0], []).append((pid, found[1]))
        if self.kind.name == "judge":
            victims["judge"] = [(self._judge.pid(), "judge")]
        roles = sorted(set(victims) - {"driver", "group"})
        if self.kind.name == "code" and "reward" not in roles and self._rng.random() < 0.8:
            return None  # its judging processes live shortly
        role = self._rng.choice(roles) if roles and self._rng.random() < 0.9 else self._rng.choice(["driver", "group"])
        pid, name = self._rng.choice(victims[role])
        signum = self._rng.choice((KILL, TERM, INT) if self._phases else SIGNALS[role])
        try:
            handled, early = has_handler(pid, signum), not has_handler(pid, USR1, caught=True)
            (os.killpg if role == "group" else os.kill)(pid, signum)
        except (ProcessLookupError, FileNotFoundError):
            return None  # it ended in this moment
        injection = Injection(role, name, signum, time.monotonic(), handled, early)
        injection.codes = self._codes(injection)
        if signum == STOP:
            self._thaw(pid, role)
        return injection

    def _thaw(self, pid: int, role: str) -> None:
        """Continue a stopped process, before or after its deadline."""
        longest = {"env": 9.0, "reward": 12.0, "judge": 5.0}.get(role, 3.0)
        time.sleep(self._rng.uniform(0.2, longest))  # the fault itself
        try:
            (os.killpg if role == "group" else os.kill)(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it was killed as one that hangs

    def _codes(self, injection: Injection) -> set[int]:
        if injection.role in ("driver", "group"):
            # CPython ends by SIGINT, whatever we return, where one went through `exec` (a dataclass is made).
            polite = {INT: {130, -INT} if injection.early else {130}, TERM: {143}, HUP: {143}}
            codes = polite.get(injection.signum, set()) if injection.handled else {-injection.signum}
            # Its workers may be younger than it: those that the same signal killed end the run.
            return codes | ({4} if injection.role == "group" and injection.signum != STOP else set())
        dies = injection.fatal or (injection.signum == STOP and injection.role in ("env", "policy", "young"))
        if injection.role == "judge":
            return {1}  # without the service no reply has a reward, which ends the run
        if injection.role in ("reward", "program"):
            return set()
        # Ray's handlers of these signals end a worker.
        dies = dies or (self._on_ray and injection.signum in (TERM, INT))
        return {4} if dies else set()

    def _check(self, command: Command, code: int, injections: Sequence[Injection]) -> None:
        said = command.printed
        allowed = {0}.union(*(i.codes for i in injections))
        if code == 1 and INT in {i.signum for i in injections if i.early} and "init_import_site" in said:
            return  # Python itself reports Ctrl-C before any code of the command runs
        assert code in allowed, f"exit code {code}, not {sorted(allowed)}:\n{said}"
        # Agents of a Ray node wait a minute for a head that was killed.
        deadline_s = 90 if self._on_ray else 10
        assert wait_until(lambda: not marked_processes(), deadline_s), f"left behind: {marked_processes()}"
        assert not list(Path("/dev/shm").glob("embodyrl*"))
        # Ray keeps its logs, to which errors refer.
        kept = self.folder / "tmp" / "ray"
        left = [f for f in (self.folder / "tmp").rglob("*") if f.is_file() and kept not in f.parents]
        assert code < 0 or not left, left
        assert "Traceback" not in said, said
        assert code != 4 or "worker " in said, said
        assert code != 1 or "has a reward: " in said, said
        hints = ["resume with", "run the same command", "second signal"]
        hints += ["embodyrl: interrupted."] * any(i.early for i in injections)
        assert code not in (130, 143) or any(h in said for h in hints) or not (self.folder / "run").exists(), said
        self._check_deaths(injections, code)
        self.kind.check(self.folder, complete=False)

    def _check_deaths(self, injections: Sequence[Injection], code: int) -> None:
        """Check that every worker that a signal killed is named, unless the run ended for another reason."""
        if code not in (0, 4):
            return
        events = [p.read_text() for p in self.folder.rglob("events.log")]
        said = " ".join(
            " ".join(
                [(self.folder / "stdout.txt").read_text(), (self.folder / "stderr.txt").read_text(), *events]
            ).split()
        )
        last = time.monotonic()
        for injection in injections:
            if injection.fatal and injection.role in ("env", "policy", "rollout", "young") and last - injection.at > 5:
                named = "died on" if self._on_ray else f"died with {signal.Signals(injection.signum).name}"
                who = "worker " if injection.role == "young" else f"worker {injection.name} "
                assert f"{who}{named}" in said or (injection.role == "young" and named in said), f"{who}{named}: {said}"


@dataclass
class Chaos:
    """All trials of a call."""

    folder: Path
    seed: int
    only: Sequence[str] = ()
    quota: tuple[int, int] = (8, 20)
    """Minimum and maximum number of signals per trial."""
    phases: bool = False
    """True to send each signal in a random phase of a training run."""
    fork: bool = False
    """True to run commands in forks of this process, with launcher=inline."""

    def __post_init__(self) -> None:
        self.judge = Judge()
        self.judge.pid()
        self._shared = self.folder / "shared"
        self._shared.mkdir(exist_ok=True)
        write_programs(self._shared / "programs.jsonl")
        self.kinds = [k for k in kinds(self._shared, self.judge.url) if not self.only or k.name in self.only]
        self._calm: dict[str, tuple[Any, float]] = {}

    def start(self, command: str, *words: str, cwd: Path) -> Command:
        """Start a command of embodyrl."""
        if not self.fork:
            return start_cli(command, *words, cwd=cwd)
        return fork_cli(command, *words, *(() if "--resume" in words else ("launcher=inline",)), cwd=cwd)

    def calm(self, kind: Kind) -> tuple[Any, float]:
        """Return outcome and duration of an undisturbed run."""
        if kind.name not in self._calm:
            if kind.name == "sft" and not (self._shared / "demos").exists():
                _, collecting = next((None, k) for k in kinds(self._shared, "") if k.name == "collect")
                assert (c := start_cli(*collecting.start(self._shared), cwd=self._shared)).wait(LIMIT_S) == 0, c.printed
            kind.prepare()
            folder = self.folder / f"calm_{kind.name}"
            seconds = folder / "seconds"
            if not seconds.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                begun = time.monotonic()
                command = self.start(*kind.start(folder), cwd=folder)
                assert command.wait(LIMIT_S) == 0, command.printed
                kind.check(folder, complete=True)
                seconds.write_text(str(time.monotonic() - begun))
            self._calm[kind.name] = kind.outcome(folder), float(seconds.read_text())
        return self._calm[kind.name]

    def trials(self, minutes: float, injections: int) -> Iterator[tuple[Trial, str]]:
        """Yield trials with their violations (empty: none), until the time or the number of injections is used up."""
        number = sum(1 for _ in read_rows(self.folder / LOG))
        rng, end, sent = random.Random(self.seed + number), time.monotonic() + 60 * minutes, 0
        while time.monotonic() < end and sent < injections:
            kind = self.kinds[number % len(self.kinds)]
            outcome, typical = self.calm(kind)
            folder = self.folder / f"{number:03d}_{kind.name}"
            shutil.rmtree(folder, ignore_errors=True)  # of a call that was cut off
            folder.mkdir()
            trial = Trial(kind, folder, random.Random(rng.random()), self.judge, typical, self)
            wrong, equal = "", False
            try:
                trial.run(quota=trial._rng.randint(*self.quota))
                judged = {"reward", "program", "judge"} & {i.role for i in trial.injections}
                if kind.exact and not judged:
                    assert kind.outcome(folder) == outcome, "the numbers differ from those of an undisturbed run"
                    equal = True
            except AssertionError as error:
                wrong = str(error) or "an assertion failed"
            signals = [(i.role, signal.Signals(i.signum).name) for i in trial.injections]
            phases = [i.phase for i in trial.injections]
            row = {
                "phases": phases,
                "kind": kind.name,
                "signals": signals,
                "ends": len(trial.codes),
                "equal": equal,
                "fell": bool(wrong),
            }
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            if not wrong:
                shutil.rmtree(folder)
            yield trial, wrong
            sent, number = sent + len(trial.injections), number + 1


def table(counts: Mapping[tuple[str, str], int]) -> str:
    """Counts by row and column."""
    names = sorted({name for _, name in counts}, key=lambda name: (not name.startswith("SIG"), name))
    rows = {row: [counts.get((row, name)) or "" for name in names] for row, _ in counts}
    return "\n".join(
        f"{row:16}" + "".join(f"{cell:>9}" for cell in cells) for row, cells in {"": names, **rows}.items()
    )


def tables(folder: Path) -> str:
    """Return the tables of all trials of a folder: by process, and by kind of run and check."""
    processes, kinds_of_run, phases = Counter(), Counter(), Counter()
    for row in read_rows(folder / LOG):
        for role, name in row["signals"]:
            processes[role, name] += 1
            kinds_of_run[row["kind"], name] += 1
        for (_, name), phase in zip(row["signals"], row.get("phases", ()), strict=False):
            phases[phase or "any", name] += 1
        for name in ("ends", "equal", "fell"):
            kinds_of_run[row["kind"], name] += row[name]
    tables = (table(counts) for counts in (processes, phases, kinds_of_run))
    return f"{processes.total()} injections\n" + "\n\n".join(tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--injections", type=int, default=10**9, help="end after n")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="some kinds only, with commas")
    parser.add_argument("--phases", action="store_true", help="KILL, TERM or INT in a random phase of a training run")
    parser.add_argument("--fork", action="store_true", help="run commands in forks of this process")
    parser.add_argument("--quota", type=int, nargs=2, default=(8, 20), help="least and most signals of a trial")
    parser.add_argument("--folder", type=Path, help="for trials that fell, undisturbed runs and counts; temporary")
    args = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    fell = 0
    with tempfile.TemporaryDirectory() as name:
        folder = (args.folder or Path(name)).resolve()
        folder.mkdir(exist_ok=True)
        only = tuple(kind for kind in args.kinds.split(",") if kind)
        chaos = Chaos(folder, args.seed, only, tuple(args.quota), args.phases, args.fork)
        print(f"seed {args.seed}", flush=True)
        try:
            for trial, wrong in chaos.trials(args.minutes, args.injections):
                what = ", ".join(
                    f"{signal.Signals(i.signum).name} to {i.name}{f' ({i.phase})' if i.phase else ''}"
                    for i in trial.injections
                )
                print(f"{trial.folder.name}: {what or 'nothing'}; exit codes {trial.codes}", flush=True)
                if wrong:
                    fell += 1
                    print(f"FELL: {wrong}", flush=True)
        finally:
            chaos.judge.close()
        print(tables(folder))
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
