"""The driver's event loop is not reentrant, and every wait ends."""

from __future__ import annotations

import pytest
from toy_runs import running_crew, train_toy

from embodyrl.channels.messages import LoadRequest, SaveRequest, WorkerReady
from embodyrl.cluster.protocol import WorkerDied
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.errors import CheckpointError
from embodyrl.scheduler.event_loop import Actors
from embodyrl.scheduler.scheduler import RolloutScheduler

ASYNC = ("algorithm.max_staleness=1", "actor.micro_batch_size=2", "runner.max_steps=3")


@pytest.mark.parametrize("apart", [(), ("rollout.mode=disaggregated",)], ids=["together", "apart"])
def test_event_loop_is_not_reentrant(tmp_path, monkeypatch, apart):
    """In asynchronous training with interleaved updates during a weight transfer."""
    under_way: list[str] = []
    seen: set[str] = set()

    def alone(kind, name):
        original = getattr(kind, name)

        def watched(*args, **kwargs):
            assert not under_way, f"{name} inside {under_way}"
            under_way.append(name)
            seen.add(name)
            try:
                return original(*args, **kwargs)
            finally:
                under_way.pop()

        monkeypatch.setattr(kind, name, watched)

    alone(Supervisor, "pump")
    alone(RolloutScheduler, "advance")
    train_toy(tmp_path, *ASYNC, *apart)
    assert seen == {"pump", "advance"}


def test_wait_without_pending_requests_fails_an_assertion(tmp_path):
    with running_crew(tmp_path) as stage, pytest.raises(AssertionError, match="no worker is busy"):
        stage.workers.scheduler.run_until(lambda: False)


def test_request_to_all_ranks_returns_the_reply_or_raises(tmp_path):
    with running_crew(tmp_path) as stage:
        done = stage.workers.scheduler.call(SaveRequest(folder=str(tmp_path / "saved")))
        assert done.seconds > 0
        assert (tmp_path / "saved" / "policy").is_dir()
        with pytest.raises(CheckpointError):
            stage.workers.scheduler.call(LoadRequest(folder=str(tmp_path / "missing")))


def test_twice_crashed_rollout_process_gets_the_weights_once(tmp_path):
    with running_crew(tmp_path, "rollout.mode=disaggregated", "rollout.num_workers=2") as stage:
        policy, scheduler = stage.workers.policy, stage.workers.scheduler
        scheduler.publish(0)
        names = ("rollout_0", "rollout_1")
        ready = {name: WorkerReady(weights=policy._weights[name]) for name in names}
        for name in names:
            policy.on_message(name, WorkerDied(reason="died", log=""))
        for name in names:
            policy.on_message(name, ready[name])
        assert policy.num_free == 0
        policy.advance()  # the first process receives weights, the second one waits
        policy.on_message("rollout_1", WorkerDied(reason="died", log=""))
        scheduler.run_until(lambda: policy.num_free == 1)
        policy.on_message("rollout_1", ready["rollout_1"])
        policy.advance()
        scheduler.run_until(lambda: policy.idle)
        assert policy.num_free == 2


@pytest.mark.parametrize("content", ["[]", "7", "{}", "[" * 200_000], ids=["list", "number", "empty", "deep"])
def test_damaged_algorithm_state_is_a_checkpoint_error(tmp_path, content):
    with running_crew(tmp_path, "algorithm.curriculum=0.5") as stage:
        assert stage.run_plan.algorithm is not None
        actors = Actors(stage.workers.scheduler, stage.workers.arena, stage.run_plan.algorithm, stage.run_plan)
        actors.save(tmp_path)
        actors.load(tmp_path)
        (tmp_path / "algorithm.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"algorithm.json is damaged"):
            actors.load(tmp_path)
