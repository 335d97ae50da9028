"""Three hosts with their own addresses: results equal one host's, and survive lost hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from outcomes import ROLLOUT, SPREAD, UPDATE, on_one_host, result, resume_command, start

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
    ),
]


def test_three_hosts_match_one_host(lab, tmp_path, outcome):
    expected = on_one_host(tmp_path, SPREAD)
    hosts = ", ".join(f"node {n} host{n} (10.77.0.{n + 1})" for n in range(3))
    preview = start(lab, tmp_path, SPREAD, "--dry-run")
    assert preview.wait(100) == 0, preview.printed
    assert hosts in preview.printed
    command = start(lab, tmp_path, SPREAD)
    assert command.wait(300) == 0, command.printed
    assert hosts in command.printed
    assert result(tmp_path / "run") == expected
    outcome.check_leftovers()

    outcome.show("same numbers")


def test_run_continues_after_an_env_host_loses_power(lab, tmp_path, outcome):
    expected = on_one_host(tmp_path, ROLLOUT)
    command = start(lab, tmp_path, ROLLOUT, held=True)
    command.wait_for(lab.gate, deadline_s=200)
    lab.lose_power(ROLLOUT.host)
    outcome.inject("power lost", ROLLOUT.name)
    outcome.wait_until_noticed(command)
    lab.gate.with_suffix(".open").touch()
    assert command.wait(300) == 0, command.printed
    assert "its running episodes start again" in command.printed
    assert result(tmp_path / "run") == expected
    outcome.check_leftovers()
    lab.discard_attempt(ROLLOUT.host)
    outcome.show("continues, same numbers")


def test_run_that_lost_a_rank_resumes_on_one_host(lab, tmp_path, outcome):
    expected = on_one_host(tmp_path, UPDATE)
    command = start(lab, tmp_path, UPDATE, held=True)
    command.wait_for(lab.gate, deadline_s=200)
    lab.switch.cut.add(UPDATE.host)
    outcome.inject("cut for ever", UPDATE.name)
    lab.gate.with_suffix(".open").touch()
    outcome.wait_until_noticed(command)
    assert command.wait(300) == 4, command.printed
    assert "on host1 (10.77.0.2)" in command.printed or "its host host1 (10.77.0.2)" in command.printed
    resume = resume_command(command)
    outcome.check_leftovers()
    more = lab.run(tmp_path, *resume, "launcher.name=local")
    assert more.wait(300) == 0, more.printed
    assert result(tmp_path / "run") == expected
    lab.discard_attempt(UPDATE.host)
    outcome.show("exit 4, resumed on one host: same numbers")
