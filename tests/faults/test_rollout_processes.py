"""Rollout processes that are killed restart with all weights, and results equal those of an undisturbed run."""

from __future__ import annotations

import os
import signal

import pytest
from processes import workers_of
from toy_runs import comparable, rows, train_toy, weights

from embodyrl.channels.messages import (
    InferRequest,
    LoadWeightsRequest,
    PublishRequest,
    Request,
    UpdateRequest,
    ValueRequest,
    WorkerReady,
)
from embodyrl.cluster.supervisor import Supervisor

WORDS = (
    *("runner.deterministic=true", "env.kwargs.goal=0.7", "actor.optim.lr=0.001", "model.precision=fp32"),
    *("algorithm=ppo", "runner.max_steps=2", "env.train.total_num_envs=8"),
    *("rollout.mode=disaggregated", "rollout.num_workers=2"),
)
VICTIM = "rollout_0"


def kill_at(monkeypatch: pytest.MonkeyPatch, moments: list[tuple[type[Request], int]]) -> None:
    """Kill the rollout process while it has its n-th request of a kind; remove the moment from the list."""
    seen: list[type[Request]] = []
    send = Supervisor.send

    def watched(self: Supervisor, worker: str, request: Request, *, timeout_s: float) -> None:
        if worker == VICTIM:
            seen.append(type(request))
        moment = type(request), seen.count(type(request))
        if worker != VICTIM or moment not in moments:
            return send(self, worker, request, timeout_s=timeout_s)
        moments.remove(moment)
        pid = workers_of(os.getpid())[VICTIM]
        os.kill(pid, signal.SIGSTOP)  # it cannot reply
        send(self, worker, request, timeout_s=timeout_s)
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(Supervisor, "send", watched)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "moments",
    [
        [(InferRequest, 2), (ValueRequest, 1), (LoadWeightsRequest, 4)],
        [(LoadWeightsRequest, 1), (LoadWeightsRequest, 2)],
    ],
    ids=["act_values_weights", "weights_twice"],
)
def test_killed_rollout_process_does_not_change_results(tmp_path, monkeypatch, moments):
    calm = train_toy(tmp_path, *WORDS, name="calm")
    count = len(moments)
    kill_at(monkeypatch, moments)
    run = train_toy(tmp_path, *WORDS, "launcher=local", "launcher.env_workers=1")
    assert not moments
    assert rows(run)[-1]["env/restarts"] == count
    one, other = ([row | {"env/restarts": 0} for row in comparable(one)] for one in (run, calm))
    assert one == other
    assert weights(run, 2) == weights(calm, 2)


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_rollout_process_restarted_during_an_update_gets_weights_of_its_version(tmp_path, monkeypatch):
    """The actor stands still from the start of its first update until the killed process is ready again."""
    weights_of = {"policy": 0}  # number of updates that each process's weights have seen
    sent: dict[tuple[int, ...], int] = {}  # version of each transferred part
    acted: list[tuple[int, int]] = []
    killed: list[str] = []
    send, callback = Supervisor.send, Supervisor.start

    def watched(self: Supervisor, worker: str, request: Request, *, timeout_s: float) -> None:
        pid = workers_of(os.getpid())[worker] if worker in ("policy", VICTIM) else 0
        if isinstance(request, UpdateRequest):
            weights_of["policy"] += 1
            if weights_of["policy"] == 1:
                os.kill(pid, signal.SIGSTOP)
        elif isinstance(request, PublishRequest):
            sent[request.record_ref] = weights_of["policy"]
        elif isinstance(request, LoadWeightsRequest):
            weights_of[worker] = sent[request.record_ref]
        elif isinstance(request, InferRequest):
            acted.append((request.version, weights_of[worker]))
            if weights_of["policy"] == 1 and not killed:
                killed.append(worker)
                os.kill(pid, signal.SIGSTOP)
                send(self, worker, request, timeout_s=timeout_s)
                os.kill(pid, signal.SIGKILL)
                return
        send(self, worker, request, timeout_s=timeout_s)

    def started(self: Supervisor, specs: dict) -> None:
        def heard(name, on_message):
            def hear(message):
                on_message(message)
                if name == VICTIM and isinstance(message, WorkerReady) and killed:
                    os.kill(workers_of(os.getpid())["policy"], signal.SIGCONT)

            return hear

        callback(self, {name: (spec, heard(name, on)) for name, (spec, on) in specs.items()})

    monkeypatch.setattr(Supervisor, "send", watched)
    monkeypatch.setattr(Supervisor, "start", started)
    lag = ("~runner.deterministic", "algorithm.max_staleness=1", "rollout.num_workers=1", "runner.max_steps=3")
    run = train_toy(tmp_path, *WORDS, *lag, "launcher=local", "launcher.env_workers=1")
    assert killed == [VICTIM]
    assert rows(run)[-1]["env/restarts"] == 1
    assert {label for label, _ in acted} >= {0, 1}
    assert all(label == version for label, version in acted)
