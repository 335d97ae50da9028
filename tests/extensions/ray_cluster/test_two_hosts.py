"""Two hosts with a slow, lossy or interrupted network: equal results or a clear error."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Command, wait_until
from toy_runs import comparable, toy_words, weights
from two_hosts import Hosts, two_hosts

from embodyrl.channels.layout import BUCKET_BYTES
from embodyrl.checkpoint.store import CheckpointStore

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
    ),
]


@dataclass(frozen=True)
class Phase:
    """A phase in which a run waits at a gate, and the placement of its processes."""

    name: str
    words: tuple[str, ...]
    placement: str
    gate: str = "algorithm.adv_type=toy_gates:GATED_GRPO"
    survives: bool = False
    """True if the run continues without the second host."""


APART = ("rollout.mode=disaggregated", "model.precision=fp32")
RANKS = ("actor.fsdp.size=2", "env.train.total_num_envs=8")
PHASES = (
    Phase("rollout", (), "{env:1,rollout:0,actor:0}", "env.kwargs.fault=gate", survives=True),
    Phase("update", RANKS, "{env:0,rollout:all,actor:all}"),
    Phase("publish", APART, "{env:0,rollout:1,actor:0}", survives=True),
    Phase("save", RANKS, "{env:0,rollout:all,actor:all}", "model.model_type=toy_gates:GATED_CNN"),
)
by_phase = pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.name)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(hosts: Hosts) -> None:
    """True if the link is up and both nodes run."""
    hosts.wire.cut, hosts.wire.delay_s, hosts.wire.loss, hosts.wire.bytes_per_s = False, 0.0, 0.0, float("inf")
    for path in hosts.gate.parent.glob("gate*"):
        path.unlink()
    hosts.start_ray()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Ray nodes outlive a single test in this module."""


calm: dict[str, tuple[list[dict[str, float]], dict[str, bytes]]] = {}


def start(hosts: Hosts, folder: Path, phase: Phase, *more: str, held: bool) -> Command:
    spread = ("launcher.name=ray", "cluster.num_nodes=2", f"cluster.component_placement={phase.placement}")
    steps = ("runner.max_steps=2", "runner.save_interval=1", "runner.deterministic=true", "launcher.env_workers=1")
    learn = ("env.kwargs.goal=0.7", "actor.optim.lr=0.001", "faults.update_timeout_s=300")
    gate = (phase.gate, f"env.kwargs.once={hosts.gate}", "env.kwargs.at=5") if held else ()
    words = toy_words(folder, *spread, *steps, *learn, *phase.words, *gate, *more)
    return hosts.run(folder, "train", *words)


def outcome(run: Path) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    return [row | {"env/restarts": 0} for row in comparable(run)], weights(run, 2)


def undisturbed(hosts: Hosts, folder: Path, phase: Phase) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    if phase.name not in calm:
        (folder / "calm").mkdir()
        command = start(hosts, folder / "calm", phase, held=False)
        assert command.wait(300) == 0, command.printed
        calm[phase.name] = outcome(folder / "calm" / "run")
    return calm[phase.name]


@by_phase
def test_slow_lossy_network_does_not_change_results(hosts, tmp_path, phase):
    expected = undisturbed(hosts, tmp_path, phase)
    hosts.wire.delay_s, hosts.wire.loss = 0.02, 0.005
    command = start(hosts, tmp_path, phase, held=False)
    assert command.wait(400) == 0, command.printed
    assert outcome(tmp_path / "run") == expected


def test_link_of_100_megabits_does_not_change_results(hosts, tmp_path):
    expected = undisturbed(hosts, tmp_path, PHASES[2])
    hosts.wire.bytes_per_s = 12.5e6
    command = start(hosts, tmp_path, PHASES[2], held=False)
    assert command.wait(400) == 0, command.printed
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize("loss", ["raylet killed", "power lost", "power lost, link back"])
def test_run_continues_without_a_lost_env_host(hosts, tmp_path, loss):
    """Without power, the driver's connections stay half-open, because no packet closes them."""
    expected = undisturbed(hosts, tmp_path, PHASES[0])
    command = start(hosts, tmp_path, PHASES[0], held=True)
    command.wait_for(hosts.gate, deadline_s=200)
    if loss == "raylet killed":
        hosts.kill_service(1, "raylet/raylet")
    else:
        hosts.lose_power(1)
        hosts.wire.cut = loss == "power lost"
    hosts.gate.with_suffix(".open").touch()
    assert command.wait(400) == 0, command.printed
    assert "its running episodes start again" in command.printed
    assert outcome(tmp_path / "run") == expected
    assert wait_until(lambda: not hosts.workers(1), 20)
    hosts.lose_second()


@by_phase
def test_two_second_network_outage_does_not_change_results(hosts, tmp_path, phase):
    expected = undisturbed(hosts, tmp_path, phase)
    command = start(hosts, tmp_path, phase, held=True)
    command.wait_for(hosts.gate, deadline_s=200)
    hosts.wire.cut = True
    hosts.gate.with_suffix(".open").touch()
    time.sleep(2.0)  # the fault itself
    hosts.wire.cut = False
    assert command.wait(400) == 0, command.printed
    assert outcome(tmp_path / "run") == expected


@by_phase
def test_permanent_network_outage_keeps_checkpoints(hosts, tmp_path, phase):
    expected = undisturbed(hosts, tmp_path, phase)
    command = start(hosts, tmp_path, phase, held=True)
    command.wait_for(hosts.gate, deadline_s=200)
    hosts.wire.cut = True
    hosts.gate.with_suffix(".open").touch()
    code = command.wait(400)
    hosts.lose_second()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in store.steps():
        store.verify(store.path(step))
    if phase.survives:
        assert code == 0, command.printed
        assert re.search("restarting it .1 of 3.; its running (episodes|requests) start again", command.printed)
    else:
        assert code == 4, command.printed
        assert "worker " in command.err.read_text()
        hosts.wire.cut = False
        one = ("cluster.num_nodes=1", "cluster.component_placement={env:0,rollout:0,actor:0}", "trust=true")
        more = hosts.run(tmp_path, "train", "--resume", str(tmp_path / "run"), *one)
        assert more.wait(400) == 0, more.printed
    assert outcome(tmp_path / "run") == expected
    assert wait_until(lambda: not (tmp_path / "run" / "lock").exists(), 5)


def test_weight_transfer_traffic_equals_the_size_of_the_weights(hosts, tmp_path):
    """Three transfers to a rollout process on the other host; fails if each costs a whole bucket."""
    before = hosts.wire.carried_bytes
    command = start(hosts, tmp_path, PHASES[2], held=False)
    assert command.wait(400) == 0, command.printed
    assert hosts.wire.carried_bytes - before < BUCKET_BYTES // 2


@pytest.mark.parametrize("fault", ["cut", "frozen"])
def test_workers_exit_without_the_cluster(hosts, tmp_path, fault):
    """Ray itself ends the workers of a host without a head after a minute, and those of a frozen head never."""
    command = start(hosts, tmp_path, PHASES[0], "cluster.silence_timeout_s=5", held=True)
    command.wait_for(hosts.gate, deadline_s=200)
    assert hosts.workers(1)
    if fault == "cut":
        hosts.wire.cut = True
        assert wait_until(lambda: not hosts.workers(1), 40)
    else:
        with hosts.frozen(0):
            assert wait_until(lambda: not hosts.workers(1), 40)
    hosts.gate.with_suffix(".open").touch()
    assert command.wait(400) == 0, command.printed
    if fault == "cut":
        hosts.lose_second()


def test_killed_head_ends_the_run_with_its_address(hosts, tmp_path):
    command = start(hosts, tmp_path, PHASES[0], "cluster.silence_timeout_s=5", held=True)
    command.wait_for(hosts.gate, deadline_s=200)
    hosts.kill_service(0, "gcs/gcs_server")
    assert command.wait(200) == 4, command.printed  # the gate stays closed
    assert "the Ray head at 10.77.0.1:6379 did not respond" in " ".join(command.printed.split())
    assert "Traceback" not in command.printed
    assert wait_until(lambda: not hosts.workers(0) and not hosts.workers(1), 40)
    assert not (tmp_path / "run" / "lock").exists()
    hosts.lose_all()


def test_run_with_too_few_hosts_saves_and_stops(hosts, tmp_path):
    command = start(hosts, tmp_path, PHASES[0], "cluster.min_nodes=2", held=True)
    command.wait_for(hosts.gate, deadline_s=200)
    hosts.wire.cut = True
    assert command.wait(200) == 4, command.printed
    hosts.lose_second()
    assert "only 1 of 2 hosts are left (cluster.min_nodes=2)" in command.printed
    saved, _, resume = command.printed.rstrip().splitlines()[-1].partition("; ")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.verify(store.path(store.steps()[-1]))
    assert saved == f"saved {store.path(store.steps()[-1])}"
    assert resume.startswith("resume with: embodyrl train --resume")
