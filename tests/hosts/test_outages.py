"""Faults of hosts and of their network: equal results, or a clear error and a checkpoint to resume."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from outcomes import PUBLISH, RANKED, ROLLOUT, SAVE, SPREAD, UPDATE, on_one_host, result, resume_command, start
from processes import wait_until

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
    ),
]
by_phase = pytest.mark.parametrize("phase", [ROLLOUT, UPDATE, PUBLISH, SAVE], ids=lambda p: p.name)


@pytest.mark.parametrize("network", ["20 ms, 1 % loss", "100 Mbit/s"])
def test_slow_or_lossy_network_does_not_change_results(lab, tmp_path, outcome, network):
    expected = on_one_host(tmp_path, SPREAD)
    if network == "100 Mbit/s":
        lab.switch.bytes_per_s = 12.5e6
    else:
        lab.switch.delay_s, lab.switch.loss = 0.02, 0.01
    outcome.inject(network, "always")
    command = start(lab, tmp_path, SPREAD)
    assert command.wait(400) == 0, command.printed
    assert result(tmp_path / "run") == expected
    outcome.check_leftovers()

    outcome.show("same numbers")


@by_phase
def test_five_second_outage_does_not_change_results(lab, tmp_path, outcome, phase):
    expected = on_one_host(tmp_path, phase)
    command = start(lab, tmp_path, phase, held=True)
    command.wait_for(lab.gate, deadline_s=200)
    lab.switch.cut.add(phase.host)
    outcome.inject("cut for 5 s", phase.name)
    lab.gate.with_suffix(".open").touch()
    time.sleep(5.0)  # the fault itself
    lab.switch.restore()
    assert command.wait(400) == 0, command.printed
    assert "restarting it" not in command.printed
    assert result(tmp_path / "run") == expected
    outcome.check_leftovers()
    outcome.show("same numbers")


FAULTS = ("cut for ever", "cut for 60 s", "frozen", "power lost", "power lost, link back", "raylet killed")
CASES = [(fault, phase) for fault in FAULTS for phase in (ROLLOUT, UPDATE)]
CASES += [("cut for ever", PUBLISH), ("cut for ever", SAVE)]


@pytest.mark.parametrize(("fault", "phase"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_run_continues_or_resumes_identically_after_losing_a_host(lab, tmp_path, outcome, fault, phase):
    """Without power, connections stay half-open, because no packet closes them, also when the link is back."""
    expected = on_one_host(tmp_path, phase)
    command = start(lab, tmp_path, phase, held=True)
    command.wait_for(lab.gate, deadline_s=200)
    outcome.inject(fault, phase.name)
    with lab.frozen(phase.host) if fault == "frozen" else nullcontext():
        if fault == "raylet killed":
            lab.kill_service(phase.host, "raylet/raylet")
            assert wait_until(lambda: not lab.workers(phase.host), 60)
        elif "power" in fault:
            lab.lose_power(phase.host)
        elif "cut" in fault:
            lab.switch.cut.add(phase.host)
        if fault == "power lost, link back":
            lab.switch.restore()
        lab.gate.with_suffix(".open").touch()
        outcome.wait_until_noticed(command)
        if fault == "cut for 60 s":
            time.sleep(max(0.0, outcome.begun + 60 - time.monotonic()))  # the fault itself
            lab.switch.restore()
        code = command.wait(400)
    assert "(raylet)" not in command.printed, "Ray's messages are in a log"
    if phase.survives:
        assert code == 0, command.printed
        assert "Traceback" not in command.printed
        outcome.check_leftovers()
    else:
        assert code == 4, command.printed
        assert "10.77.0.2" in command.err.read_text(), command.printed
        resume = resume_command(command)
        outcome.check_leftovers()
        lab.discard_attempt(phase.host)
        lab.switch.restore()
        lab.start_ray()
        more = lab.run(tmp_path, *resume)
        assert more.wait(400) == 0, more.printed
    assert result(tmp_path / "run") == expected
    lab.discard_attempt(phase.host)
    outcome.show("continues, same numbers" if phase.survives else "exit 4, resumed: same numbers")


@pytest.mark.parametrize("fault", ["head killed (GCS)", "head killed (GCS and raylet)"])
@pytest.mark.parametrize("phase", [ROLLOUT, RANKED], ids=lambda p: p.name)
def test_killed_head_ends_the_run_with_its_address(lab, tmp_path, outcome, phase, fault):
    """Without the raylet of its host, the policy process is lost, too."""
    expected = on_one_host(tmp_path, phase)
    command = start(lab, tmp_path, phase, "cluster.silence_timeout_s=30", held=True)
    command.wait_for(lab.gate, deadline_s=200)
    lab.kill_service(0, "gcs/gcs_server", alone=fault == "head killed (GCS)")
    outcome.inject(fault, phase.name)
    assert command.wait(200) == 4, command.printed  # the gate stays closed
    outcome.wait_until_noticed(command)
    assert "the Ray head at 10.77.0.1:6379 did not respond" in " ".join(command.printed.split())
    assert "Traceback" not in command.printed
    saved = f"saved {tmp_path / 'run' / 'checkpoints' / 'step_000000'}; resume with"
    assert ("there is no checkpoint; resume with" if "raylet" in fault else saved) in command.printed
    outcome.check_leftovers()
    lab.lose_all()
    lab.start_ray()
    lab.gate.with_suffix(".open").touch()
    resume = resume_command(command)
    more = lab.run(tmp_path, *resume)
    assert more.wait(400) == 0, more.printed
    assert result(tmp_path / "run") == expected
    outcome.show("exit 4 naming the head, resumed: same numbers")


def test_head_killed_during_an_update_names_the_newest_checkpoint(lab, tmp_path, outcome):
    expected = on_one_host(tmp_path, UPDATE)
    command = start(lab, tmp_path, UPDATE, held=True)
    command.wait_for(lab.gate, deadline_s=200)
    lab.kill_service(0, "gcs/gcs_server")
    outcome.inject("head killed (GCS and raylet)", UPDATE.name)
    assert wait_until(lambda: not lab.workers(0), 60)
    lab.gate.with_suffix(".open").touch()
    assert command.wait(200) == 4, command.printed
    outcome.wait_until_noticed(command)
    assert "10.77.0.1" in command.err.read_text(), command.printed
    assert f"the newest checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step_000001'}" in command.printed
    outcome.check_leftovers()
    lab.lose_all()
    lab.start_ray()
    more = lab.run(tmp_path, *resume_command(command))
    assert more.wait(400) == 0, more.printed
    assert result(tmp_path / "run") == expected
    outcome.show("exit 4 naming the head, resumed: same numbers")


@pytest.mark.parametrize("phase", [ROLLOUT, PUBLISH, UPDATE], ids=lambda p: p.name)
def test_full_disk_of_one_host_does_not_change_results(lab, tmp_path, outcome, phase):
    expected = on_one_host(tmp_path, phase)
    command = start(lab, tmp_path, phase, held=True)
    command.wait_for(lab.gate, deadline_s=200)
    filling = lab.temporary_folder(phase.host) / "filling"
    with open(filling, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(filling.parent).free)
    outcome.inject("disk full", phase.name)
    lab.gate.with_suffix(".open").touch()
    try:
        assert command.wait(400) == 0, command.printed
    finally:
        filling.unlink()
    assert result(tmp_path / "run") == expected
    outcome.check_leftovers()

    outcome.show("same numbers")


@pytest.mark.parametrize("fault", ["cut", "frozen"])
def test_workers_exit_if_the_cluster_is_unreachable(lab, tmp_path, fault):
    """Ray itself ends the workers of a host without a head after a minute, and those of a frozen head never."""
    command = start(lab, tmp_path, ROLLOUT, "cluster.silence_timeout_s=5", held=True)
    command.wait_for(lab.gate, deadline_s=200)
    assert lab.workers(ROLLOUT.host)
    if fault == "cut":
        lab.switch.cut.add(ROLLOUT.host)
        assert wait_until(lambda: not lab.workers(ROLLOUT.host), 40)
    else:
        with lab.frozen(0):
            assert wait_until(lambda: not lab.workers(ROLLOUT.host), 40)
    lab.gate.with_suffix(".open").touch()
    assert command.wait(400) == 0, command.printed
    if fault == "cut":
        lab.discard_attempt(ROLLOUT.host)


def test_run_with_too_few_hosts_saves_and_stops(lab, tmp_path, outcome):
    command = start(lab, tmp_path, ROLLOUT, "cluster.min_nodes=3", held=True)
    command.wait_for(lab.gate, deadline_s=200)
    lab.switch.cut.add(ROLLOUT.host)
    outcome.inject("cut for ever, min_nodes=3", ROLLOUT.name)
    assert command.wait(200) == 4, command.printed
    outcome.wait_until_noticed(command)
    assert "only 2 of 3 hosts are left (cluster.min_nodes=3)" in command.printed
    assert f"saved {tmp_path / 'run' / 'checkpoints'}" in command.printed
    assert resume_command(command)
    outcome.check_leftovers()
    lab.discard_attempt(ROLLOUT.host)
    outcome.show("exit 4")
