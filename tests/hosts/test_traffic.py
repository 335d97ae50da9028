"""Bytes of weights on the network, and a host that returns."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from outcomes import PUBLISH, ROLLOUT, on_one_host, result, start
from processes import SOURCE, wait_until
from toy_runs import TOY_OFT, rows, weights

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
    ),
]
SOUP = SOURCE / "assets" / "openvla_oft_tiny_soup"
"""Checkpoint with trained weights, which adapters require."""


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_weight_transfer_traffic_equals_the_size_of_the_weights(lab, tmp_path, outcome, adapters):
    """Fails if a transfer to a rollout process on another host costs a whole bucket, or adapters cost all weights."""
    trained = ("model.is_lora=true", f"model.path={SOUP}", "model.unnorm_key=libero_object_no_noops")
    phase = replace(PUBLISH, words=(*PUBLISH.words, *TOY_OFT, *(trained * adapters), "runner.max_steps=5"))
    command = start(lab, tmp_path, phase)
    received = []
    for lines in (1, 4):
        command.wait_for(tmp_path / "run" / "metrics.jsonl", lines=lines, deadline_s=300)
        received.append(lab.switch.carried_bytes[phase.host])
    assert command.wait(300) == 0, command.printed
    size = sum(map(len, weights(tmp_path / "run", 5).values()))
    step = (received[1] - received[0]) / 3
    name = "adapters" if adapters else "all weights"
    outcome.moment = f"{name}, {size / 1e6:.2f} MB"
    outcome.check_leftovers()
    outcome.show(f"{step / 1e6:.2f} MB a step")
    assert step < 1.5 * size + 2e5


def test_run_continues_after_an_env_host_is_lost_and_returns(lab, tmp_path, outcome):
    words = ("launcher.env_workers=2", "runner.max_steps=40", "runner.save_interval=-1", "env.kwargs.fault=slow")
    phase = replace(ROLLOUT, words=words, placement="{env:1-2,rollout:0,actor:0}")
    expected = on_one_host(tmp_path, phase)
    command = start(lab, tmp_path, phase)
    metrics = tmp_path / "run" / "metrics.jsonl"
    command.wait_for(metrics, lines=5, deadline_s=200)
    lab.lose_power(phase.host)
    outcome.inject("power lost, host returns", ROLLOUT.name)
    lost = len(rows(tmp_path / "run"))
    outcome.wait_until_noticed(command)
    command.wait_for(metrics, lines=lost + 6, deadline_s=100)
    lab.switch.restore()
    lab.start_ray()
    returned = len(rows(tmp_path / "run"))
    assert not lab.workers(phase.host), "workers do not move while they run"
    for pid in lab.workers(1):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: lab.workers(phase.host), 60), command.printed
    assert command.wait(300) == 0, command.printed
    assert result(tmp_path / "run") == expected
    outcome.check_leftovers()
    times = [row["time/step"] for row in rows(tmp_path / "run")]
    parts = times[1:lost], times[lost + 1 : returned], times[-5:]
    before, without, after = (f"{median(part):.2f} s" for part in parts)
    steps = f"step {before} before, {times[lost]:.1f} s in the outage, {without} without the host, {after} after"
    outcome.show(f"continues, same numbers; {steps}")
