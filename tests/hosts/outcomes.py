"""Runs on the hosts of a lab, their results on one host, and the outcomes of faults.

`pytest -s -m "slow or not slow" tests/hosts | grep "^|"` prints a table of the outcomes.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from lab import Lab
from processes import Command, start_cli, wait_until
from toy_runs import comparable, toy_words, weights

from embodyrl.checkpoint.store import CheckpointStore

Result = tuple[list[dict[str, float]], dict[str, bytes]]
_on_one_host: dict[tuple[str, ...], Result] = {}


@dataclass(frozen=True)
class Phase:
    """A phase in which a run waits at a gate, and the placement of its processes."""

    name: str
    words: tuple[str, ...]
    placement: str
    host: int
    """The host to lose."""
    gate: str = "algorithm.adv_type=toy_gates:GATED_GRPO"
    survives: bool = False
    """True if the run continues without the host."""


APART = ("rollout.mode=disaggregated", "model.precision=fp32")
RANKS = ("actor.fsdp.size=2", "env.train.total_num_envs=8")
ROLLOUT = Phase("rollout", (), "{env:2,rollout:0,actor:0}", 2, "env.kwargs.fault=gate", survives=True)
UPDATE = Phase("update", RANKS, "{env:2,rollout:0-1,actor:0-1}", 1)
RANKED = Phase("rollout, two ranks", RANKS, UPDATE.placement, 1, ROLLOUT.gate)
PUBLISH = Phase("publish", APART, "{env:0,rollout:2,actor:0}", 2, survives=True)
SAVE = Phase("save", RANKS, "{env:2,rollout:0-1,actor:0-1}", 1, "model.model_type=toy_gates:GATED_CNN")
SPREAD = Phase("all", (*APART, *RANKS, "launcher.env_workers=2"), "{env:1-2,rollout:host2,actor:0-1}", 2)


def words(folder: Path, phase: Phase, *more: str) -> list[str]:
    steps = ("runner.max_steps=2", "runner.save_interval=1", "runner.deterministic=true", "launcher.env_workers=1")
    learn = ("env.kwargs.goal=0.7", "actor.optim.lr=0.001", "faults.update_timeout_s=300")
    return toy_words(folder, *steps, *learn, *phase.words, *more)


def start(lab: Lab, folder: Path, phase: Phase, *more: str, held: bool = False) -> Command:
    """Start a run on the hosts; `held`: it waits at the gate in the given phase."""
    spread = ("launcher.name=ray", "cluster.num_nodes=3", f"cluster.component_placement={phase.placement}")
    gate = (phase.gate, f"env.kwargs.once={lab.gate}", "env.kwargs.at=5") if held else ()
    return lab.run(folder, "train", *words(folder, phase, *spread, "cluster.silence_timeout_s=15", *gate, *more))


def resume_command(command: Command) -> list[str]:
    """Return the arguments of the command that the run has printed to resume it."""
    line = next(line for line in command.printed.splitlines() if "resume with: " in line)
    return shlex.split(line.partition("resume with: ")[2].partition("embodyrl ")[2])


def result(run: Path) -> Result:
    rows = comparable(run)
    return [row | {"env/restarts": 0} for row in rows], weights(run, len(rows))


def on_one_host(folder: Path, phase: Phase, *more: str) -> Result:
    """Return the result of a run of local processes without faults."""
    key = (*phase.words, *more)
    if key not in _on_one_host:
        (folder / "alone").mkdir()
        command = start_cli("train", *words(folder / "alone", phase, *more), cwd=folder / "alone")
        assert command.wait(300) == 0, command.printed
        _on_one_host[key] = result(folder / "alone" / "run")
    return _on_one_host[key]


@dataclass
class Outcome:
    """What a fault led to."""

    lab: Lab
    run: Path
    fault: str = "none"
    moment: str = ""
    noticed: str = "no"
    gone: str = ""
    checkpoints: str = ""
    begun: float = 0.0

    def inject(self, fault: str, moment: str) -> None:
        self.fault, self.moment, self.begun = fault, moment, time.monotonic()

    def wait_until_noticed(self, command: Command, deadline_s: float = 200.0) -> None:
        """Wait until the run reports a lost worker or ends."""
        assert wait_until(lambda: "restarting it" in command.printed or command.process.poll() is not None, deadline_s)
        self.noticed = f"{time.monotonic() - self.begun:.0f} s"

    def check_leftovers(self) -> None:
        """Check that the run left no worker on any host, no lock, and complete checkpoints."""
        ended = time.monotonic()
        assert wait_until(lambda: not self.lab.workers(), 90), self.lab.workers()
        self.gone = f"{time.monotonic() - ended:.0f} s"
        assert wait_until(lambda: not (self.run / "lock").exists(), 5)
        store = CheckpointStore(self.run / "checkpoints")
        for step in store.steps():
            store.verify(store.path(step))
        self.checkpoints = ", ".join(map(str, store.steps()))

    def show(self, text: str) -> None:
        """Print a row: fault, moment, outcome, time until noticed, time until no worker was left, checkpoints."""
        values = (self.fault, self.moment, text, self.noticed, self.gone, self.checkpoints)
        print(f"\n| {' | '.join(values)} |")
