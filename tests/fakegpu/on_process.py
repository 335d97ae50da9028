"""A whole policy process on the fake GPU, alone and as one of eight ranks: expected syncs and copies.

A sync blocks the host until the device has finished, so a sync in a loop costs more than its kernel. Change the
table only on purpose. `FAKEGPU_PRINT=1` prints the current table.
"""

# ruff: noqa: T201
from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import Job, run

pytestmark = pytest.mark.filterwarnings("error:CUDA reports that you have")  # fork_rng over all devices

SMALL = ("actor.micro_batch_size=1", "actor.global_batch_size=32")
ONE, EIGHT = (*SMALL, "actor.fsdp.size=1"), (*SMALL, "actor.fsdp.size=8")
AGAIN = "actor.gradient_checkpointing=true"
GRAPHS = "model.cuda_graphs=true"
KL, ONCE = "algorithm.kl_beta=0.01", "algorithm.update_epoch=1"
RECOMPUTED = "algorithm.old_logprob=recompute"
SUCCESSES = ("algorithm=filtered_bc", "algorithm.average=0.9", "algorithm.learning_starts=1")
JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        Job(name="values, recomputed", model="tiny", layers=2, words=(*ONE, "algorithm=ppo", ONCE, AGAIN, GRAPHS)),
        Job(name="reference on 8", model="tiny", layers=2, words=(*EIGHT, KL), train=16),
        Job(name="recomputed on 8", model="tiny", layers=2, words=(*EIGHT, RECOMPUTED), train=16),
        Job(name="own successes on 8", model="tiny", layers=2, words=(*EIGHT, *SUCCESSES), train=16),
    )
}
EXPECTED = {
    "values, recomputed": {
        "build": (50, 50),
        "act": (3, 8),
        "act again": (3, 8),
        "update 0": (3, 16),
        "update 1": (3, 32),
    },
    "reference on 8": {
        "build": (94, 94),
        "act": (3, 8),
        "reference": (2, 16),
        "update 0": (3, 17),
        "update 1": (3, 34),
    },
    "recomputed on 8": {
        "build": (47, 47),
        "act": (3, 8),
        "update 0": (4, 24),
        "update 1": (5, 48),
    },
    "own successes on 8": {
        "build": (47, 47),
        "act": (3, 8),
        "update 0": (2, 32),
        "update 1": (4, 64),
    },
}
"""Waits of the host and copies to the device by phase; a copy from unpinned memory also waits."""


@pytest.mark.parametrize("name", JOBS)
def test_gpu_syncs_and_copies_match_the_recorded_table(name: str, tmp_path: Path) -> None:
    check(JOBS[name], tmp_path)


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
def test_largest_batch_uses_the_planned_memory(lora: bool, tmp_path: Path) -> None:
    """Two layers of 7B's widths, 64 environments."""
    words = ("actor.fsdp.size=1", "env.train.total_num_envs=64")
    got = run(Job(name="act", model="7b", layers=2, lora=lora, words=words, act=64, train=0), tmp_path)
    took = got.peaks["act"] - got.phases["build"]["live"]
    assert took == pytest.approx(got.planned["inference_batch"], rel=0.1)


def check(job: Job, folder: Path) -> None:
    """Run a job and compare its waits and copies with the table; acting and updates must not leak memory."""
    name, got = job.name, run(job, folder)
    counted = {phase: (numbers["waits"], numbers["copies"]) for phase, numbers in got.phases.items()}
    if os.environ.get("FAKEGPU_PRINT"):
        print(f'    "{name}": {counted},')
        for phase, numbers in got.phases.items():
            print("       ", phase, numbers["wait_places"])
    else:
        assert counted == EXPECTED[name], {phase: numbers["wait_places"] for phase, numbers in got.phases.items()}
    if again := got.phases.get("act again"):
        assert again["kernels"] <= 100, "a forward pass that was recorded is one launch"
    live = {phase: numbers["live"] for phase, numbers in got.phases.items()}
    assert live["update 1"] == live["update 0"], "an update leaves something behind"
    grown = live["update 0"] - live["build"]
    recordings = got.planned["inference_batch"] if "act again" in got.phases else 0
    assert grown <= got.planned["optimizer"] + recordings + 2**20, f"{grown} bytes more than before"
    kept = got.planned["weights"] + got.planned["gathered"] + got.planned["reference"]
    assert live["build"] <= 1.1 * kept + 2**20, f"{live['build']} bytes live of {kept} that are planned"
