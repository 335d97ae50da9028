"""Utilisation and waiting times against values computed by hand, and the trace of a real run."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from toy_runs import rows, train_toy

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Field, RecordLayout
from embodyrl.channels.messages import Done, EnvReport, EnvRequest, InferRequest, ResetRequest, UpdateRequest
from embodyrl.cluster.timeline import CLOCK_METRICS, Timeline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def arena():
    arena = Arena.create(RecordLayout(fields=(Field(name="version", dtype="int64"),)), 4)
    yield arena
    arena.close()


def chunks(count):
    return EnvRequest(sequence=1, stage=0, env_indices=[0] * count, sources=[0] * count, targets=[0] * count)


def inference(count):
    none = [0] * count
    return InferRequest(sequence=1, record_refs=none, noise_seeds=none, chunk_indices=none, greedy=False, version=0)


REPORT = EnvReport(sequence=1, stage=0, sim_s=1.0, render_s=0.5, reset_s=0.0)
DONE = Done(sequence=1, seconds=1.0, metrics={})


def test_utilization_of_a_step_matches_hand_computed_values(arena):
    """Seconds 0 to 10; environments: two on each of two workers.

    env_0 works 0-2 and 6-10, env_1 works 0-4; the policy acts 2-3 (two environments) and 4-6 (four environments).
    """
    clock = Clock()
    timeline = Timeline(num_envs=4, env_workers=["env_0", "env_1"], arena=arena, clock=clock)
    timeline.begin()
    timeline.on_request("env_0", chunks(2))
    timeline.on_request("env_1", chunks(2))
    for second, worker, answer, request in (
        (2, "env_0", REPORT, inference(2)),
        (3, "policy", DONE, None),
        (4, "env_1", REPORT, inference(4)),
        (6, "policy", DONE, chunks(2)),
        (10, "env_0", REPORT, None),
    ):
        clock.now = second
        timeline.on_reply(worker, answer)
        if request is not None:
            timeline.on_request("env_0" if isinstance(request, EnvRequest) else "policy", request)
    metrics = timeline.metrics()
    assert metrics["rollout/slot_occupancy"] == pytest.approx((2 * 2 + 4 * 2 + 1 * 2 + 2 * 4 + 4 * 2) / 40)
    assert metrics["rollout/policy_busy"] == pytest.approx(0.3)
    assert metrics["rollout/env_busy"] == pytest.approx((6 + 4) / 20)
    assert metrics["rollout/policy_waits_for_env"] == pytest.approx((2 + 1 + 4) / 10)
    assert metrics["rollout/env_waits_for_policy"] == pytest.approx((3 + 2) / 20)
    early = EnvRequest(sequence=1, stage=0, resets=(object.__new__(ResetRequest),))
    timeline.on_request("env_1", early)
    clock.now = 12
    timeline.on_reply("env_1", REPORT)
    assert timeline.metrics() == metrics, "resets of the next step are no part of this one"
    clock.now = 20
    timeline.on_request("env_0", chunks(2))
    clock.now = 21
    timeline.begin()
    assert timeline.metrics() == {}
    clock.now = 22
    timeline.on_reply("env_0", REPORT)
    assert timeline.metrics()["rollout/env_busy"] == pytest.approx(0.5), "what came before the step does not count"


def test_requests_outside_training_steps_are_not_stored(arena):
    """The driver of an evaluation would need 0.4 GB for a million requests."""
    timeline = Timeline(num_envs=2, env_workers=["env_0"], arena=arena)
    timeline.on_request("env_0", chunks(2))
    timeline.on_reply("env_0", REPORT)
    assert timeline.metrics() == {}


def test_staleness_is_measured_at_training_time(arena):
    timeline = Timeline(num_envs=1, env_workers=["env_0"], arena=arena)
    arena["version"][:] = [5, 4, 5, 3]
    record_refs = arena.allocate_all(4)
    timeline.on_request("policy", UpdateRequest(sequence=1, step=5, record_refs=record_refs, episode=(0, 0, 0, 0)))
    assert timeline.metrics() == {
        "rollout/staleness/0": 0.5,
        "rollout/staleness/1": 0.25,
        "rollout/staleness/2": 0.25,
        "rollout/staleness_mean": 0.75,
    }


def test_run_logs_utilization_and_writes_a_trace(tmp_path):
    run = train_toy(tmp_path, "runner.trace=true", "env.kwargs.goal=0.7")
    for row in rows(run):
        assert all(0 <= row[name] <= 1 for name in CLOCK_METRICS)
        assert row["rollout/slot_occupancy"] > 0
        assert row.get("rollout/staleness/0", 1.0) == 1.0
    events = json.loads((run / "logs" / "attempt_1" / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert set(tracks.values()) == {"env_0", "policy"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {"reset", "chunk"} == {e["name"] for e in spans if tracks[e["tid"]] == "env_0"}
    assert {"infer", "update", "save"} <= {e["name"] for e in spans if tracks[e["tid"]] == "policy"}
    for tid in tracks:
        own = sorted((e["ts"], e["dur"]) for e in spans if e["tid"] == tid)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(own)), "a worker does one thing at a time"


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_profile_adds_functions_and_operators_of_one_step_to_the_trace(tmp_path, launcher):
    run = train_toy(
        tmp_path,
        f"launcher={launcher}",
        "launcher.env_workers=1",
        "runner.profile=2",
        "runner.max_steps=3",
        "algorithm.entropy_bonus=0.01",
    )
    logs = run / "logs" / "attempt_1"
    assert not [*logs.glob("profile*")], "all profiles are in the trace"
    events = json.loads((logs / "trace.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == (["driver", "env_0", "policy"] if launcher == "local" else ["driver"])
    functions = {(processes[e["pid"]], e["name"].split()[0]) for e in events if e.get("cat") == "python"}
    policy, env = ("policy", "env_0") if launcher == "local" else ("driver", "driver")
    assert ("driver", "_Training._loop") in functions
    if launcher == "local":
        assert {(policy, "worker_main"), (env, "worker_main")} <= functions
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    assert {processes[e["pid"]] for e in operators} == {policy}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["pid"] == 1}
    updates = [e for e in events if e["ph"] == "X" and e["name"] == "update" and tracks.get(e["tid"]) == "policy"]
    backward = [e["ts"] for e in operators if "convolution_backward" in e["name"]]
    assert len(updates) == 3
    assert backward
    start = updates[1]["ts"]
    assert all(start <= time <= start + updates[1]["dur"] for time in backward), "only step 2 is profiled"


def test_deterministic_runs_log_time_metrics_separately(tmp_path):
    run = train_toy(tmp_path, "runner.deterministic=true", "runner.max_steps=1")
    (row,) = rows(run)
    assert not CLOCK_METRICS & set(row)
    assert {f"time/{name}" for name in CLOCK_METRICS} <= set(row)
    assert not (run / "logs" / "attempt_1" / "trace.json").exists()
