"""Stages with events are found at a cost that is independent of the number of stages."""

from __future__ import annotations

import numpy as np

from embodyrl.channels.messages import EnvReport, EnvRequest
from embodyrl.plan.run_plan import WorkerEnvs
from embodyrl.scheduler.env_states import Stages


def stages() -> Stages:
    workers = [WorkerEnvs(name=f"env_{n}", env_indices=range(4 * n, 4 * n + 4)) for n in range(100)]
    return Stages(workers, 2)


def keys(found: Stages, work: object) -> list[tuple[str, int]]:
    return [key for key, _ in found.get_stages_to_check((work,))]


def test_only_stages_with_new_events_are_checked():
    found = stages()
    assert len(keys(found, 1)) == 200
    assert keys(found, 1) == []
    found.mark_changed(np.array([399, 5, 4]))
    assert keys(found, 1) == [("env_1", 0), ("env_99", 1)]
    assert keys(found, 1) == []
    found.mark_worker_changed("env_7")
    assert keys(found, 1) == [("env_7", 0), ("env_7", 1)]
    assert found.get_envs("env_7") == [28, 29, 30, 31]


def test_new_episodes_cause_a_check_of_all_idle_stages():
    found = stages()
    keys(found, 1)
    found.busy["env_3", 1] = request = EnvRequest(stage=1, sequence=9)
    checked = keys(found, 2)
    assert len(checked) == 199
    assert ("env_3", 1) not in checked
    assert len(found.get_stages_to_check(None)) == len(found.get_stages_to_check(None)) == 199
    report = EnvReport(sequence=9, stage=1, sim_s=0.0, render_s=0.0, reset_s=0.0)
    found.finish_request("env_3", report)
    assert found.pop_reports() == [(12, request, report)]
    assert found.pop_reports() == []
    assert len(found.get_stages_to_check(None)) == 200


def test_requests_of_a_dead_worker_are_dropped():
    found = stages()
    for worker in ("env_3", "env_4"):
        found.busy[worker, 1] = EnvRequest(stage=1)
    found.drop_requests("env_3")
    assert list(found.busy) == [("env_4", 1)]
