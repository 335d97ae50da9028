"""Random signals of `chaos.py` in all kinds of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import PHASES, Chaos, Injection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KINDS = (
    "collect",
    "inline",
    "local",
    "ranks",
    "apart",
    "async",
    "code",
    "judge",
    "sft",
    "eval",
    "iql",
    "dagger",
    "sweep",
)


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    made = Chaos(tmp_path, seed=5)
    yield made
    made.judge.close()


def disturb(chaos: Chaos, kind: str, injections: int) -> list[Injection]:
    chaos.quota = (1, injections)
    chaos.kinds = [k for k in chaos.kinds if k.name == kind]
    sent: list[Injection] = []
    for trial, wrong in chaos.trials(minutes=20.0, injections=injections):
        assert not wrong, f"{trial.folder.name}: {trial.injections}: {wrong}"
        sent += trial.injections
    return sent


def test_sixty_signals_in_all_training_phases_leave_no_process_and_change_no_result(tmp_path: Path) -> None:
    made = Chaos(tmp_path, seed=64, only=("inline", "cartpole"), quota=(4, 8), phases=True, fork=True)
    sent: list[Injection] = []
    try:
        for trial, wrong in made.trials(minutes=25.0, injections=60):
            assert not wrong, f"{trial.folder.name}: {trial.injections}: {wrong}"
            sent += trial.injections
    finally:
        made.judge.close()
    assert len(sent) >= 60
    assert {injection.phase for injection in sent} >= {*PHASES, "resume"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_completes_despite_random_faults(chaos, kind):
    assert len(disturb(chaos, kind, 8)) > 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("embodyrl")]
